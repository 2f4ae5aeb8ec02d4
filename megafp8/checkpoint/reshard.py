"""Changing a checkpoint's layout without its ranks: in one process, streaming, all accounted for.

The global view of all tensors stays what it is. Only scale state that differs between ranks
depends on the layout; the rule for it is in `rank_scales`.
"""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.files import (
    LATEST_NAME,
    RECORD_NAME,
    iteration_name,
    iteration_of,
    reading,
)
from megafp8.checkpoint.find import advice, find_checkpoint, read_record
from megafp8.checkpoint.holdings import plan_holdings
from megafp8.checkpoint.kinds import found_instead
from megafp8.checkpoint.offline import write_streaming
from megafp8.checkpoint.rank_scales import LOCAL_PREFIX, describe_move, local_entry
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.record import CheckpointRecord, TensorEntry
from megafp8.checkpoint.scale_checks import RankState
from megafp8.checkpoint.tensors import bytes_of, crc32_of_tensor
from megafp8.checkpoint.values import flaw, summary
from megafp8.config import Layout, ModelShape, RunConfig
from megafp8.config.axes import smallest_world
from megafp8.config.layout import build_layout, shard_problem
from megafp8.errors import CheckpointError, ConfigurationError
from megafp8.log import get_logger

log = get_logger(__name__)

# Degrees that a refusal tries out to say which are allowed.
_TRIED = range(1, 65)


@dataclass(frozen=True)
class TargetLayout:
    """The layout to change to; the fields are the flags of the tool.

    Attributes:
        tensor_model_parallel_size: ranks that split each linear.
        pipeline_model_parallel_size: ranks that split the layers.
        fsdp_size: ranks that shard parameters.
        replicate_size: copies of each set of shards.
        num_layers_per_virtual_pipeline_stage: layers per model chunk (interleaved schedule).
        pipeline_schedule: None for interleaved with the former, else 1f1b.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    fsdp_size: int = 1
    replicate_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None
    pipeline_schedule: str | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return smallest_world(self)


@dataclass(frozen=True)
class Conserved:
    """What became of one tensor.

    Attributes:
        name: canonical name.
        before, after: shape and dtype.
        crc_before, crc_after: CRC-32 of the global view's bytes, read from the files.
        rule: "kept", or what was done to scale state that differs between ranks.
    """

    name: str
    before: TensorEntry
    after: TensorEntry
    crc_before: str
    crc_after: str
    rule: str


@dataclass(frozen=True)
class ReshardReport:
    """A finished change of layout.

    Attributes:
        source, path: the checkpoints.
        layout: the new layout.
        notes: what else changed, or will need a flag at the next start.
        tensors: one entry for each tensor.
    """

    source: Path
    path: Path
    layout: Layout
    notes: list[str]
    tensors: list[Conserved]

    def lines(self) -> list[str]:
        """Return the report as text: one line a tensor, then the totals."""
        width = max(len(row.name) for row in self.tensors)
        lines = []
        for row in self.tensors:
            shape = f"{row.after.dtype}{list(row.after.shape)}"
            sums = f"crc32 {row.crc_before} -> {row.crc_after}"
            lines.append(f"{row.name:<{width}}  {sums}  {shape}  {row.rule}")
        kept = sum(row.rule == "kept" for row in self.tensors)
        total = sum(bytes_of(row.after) for row in self.tensors)
        lines += [f"note: {note}" for note in self.notes]
        lines.append(
            f"{len(self.tensors)} tensors, {total / 1e6:.1f} MB: {kept} kept bit for bit, "
            f"{len(self.tensors) - kept} of scale state by rule, none lost"
        )
        lines.append(f"{self.source} -> {self.path} ({describe_layout(self.layout)})")
        return lines


def layout_fields(layout: Layout) -> dict[str, Any]:
    """Return a layout as `megafp8.json` holds it."""
    return {
        "world_size": layout.world_size,
        **layout.degrees,
        "pipeline_schedule": layout.schedule,
    }


def describe_layout(layout: Layout) -> str:
    """Return a layout as words."""
    degrees = layout.degrees
    chunks = f" (vp {degrees.pop('vp')})"
    sizes = (f"{name} {size}{chunks if name == 'pp' else ''}" for name, size in degrees.items())
    return f"{layout.world_size} ranks: {' x '.join(sizes)}"


def reshard_checkpoint(load: Path, save: Path, target: TargetLayout) -> ReshardReport:
    """Write a checkpoint as the ranks of another layout would have saved it.

    Args:
        load: a folder of checkpoints, or one of them.
        save: folder for the new one, which is named as its iteration; it may not hold it yet.
        target: the new layout.

    Returns:
        What became of each tensor.

    Raises:
        CheckpointError: the source is partial or damaged, the target is there, a file cannot be
            written, or anything was lost. Nothing that looks like a checkpoint is left behind.
        ConfigurationError: the model does not fit the layout.
    """
    source = find_checkpoint(load)
    if source is None:
        raise CheckpointError(f"--load {load} holds no checkpoint{found_instead(load)}")
    root = _root_of(source, Path(save).absolute())
    with reading(source):  # a run's --keep-last leaves it alone meanwhile
        return _reshard(source, root, target)


def _reshard(source: Path, root: Path, target: TargetLayout) -> ReshardReport:
    reader = TensorReader.open(source, checksums=True)
    config, layout, notes = target_run(reader.record, target, source)
    shape = ModelShape.from_config(config, _vocab_size(reader.record, source))
    entries = {
        name: local_entry(name, entry, *layout.scale_ranks)
        for name, entry in reader.record.tensors.items()
    }
    holdings = plan_holdings(entries, shape, layout)
    record = dataclasses.replace(
        reader.record,
        config=config.model_dump(mode="json"),
        layout=layout_fields(layout),
        tensors=dict(sorted(entries.items())),
    )
    before: dict[str, str] = {}
    flaws: dict[str, str] = {}
    ranks = RankState(reader)

    def read(name: str) -> Tensor:
        tensor = reader.read(name)
        before[name] = crc32_of_tensor(tensor)
        found = flaw(name, tensor)
        if found is not None:
            flaws[name] = f"{name} {found}"
        if name.startswith(LOCAL_PREFIX):
            tensor = ranks.moved(name, tensor, *layout.scale_ranks)
        return tensor

    former = _named_by_latest(root)
    path, after = write_streaming(root, record, holdings, read)
    if former is not None and former != path.name:
        notes = [*notes, f"{root / LATEST_NAME} named {former} before, it names {path.name} now"]
    rows = [_row(reader, name, entries[name], before[name], after[name]) for name in reader.names]
    lost = [row.name for row in rows if row.rule == "kept" and row.crc_before != row.crc_after]
    if flaws:
        wrong = summary([flaws[name] for name in sorted(flaws)])
        notes = [*notes, f"WARNING, kept as they are, but no run can go on from them: {wrong}"]
    assert not lost, lost  # `write_streaming` has compared them already
    return ReshardReport(source, path, layout, notes, rows)


def _row(source: TensorReader, name: str, new: TensorEntry, before: str, after: str) -> Conserved:
    entry, rule = source.entry(name), "kept"
    if name.startswith(LOCAL_PREFIX):
        rule = describe_move(name, entry.shape, *new.shape[:2])
    return Conserved(name, entry, new, before, after, rule)


def _named_by_latest(root: Path) -> str | None:
    path = root / LATEST_NAME
    return path.read_text(errors="replace").strip()[:80] if path.is_file() else None


def _root_of(source: Path, save: Path) -> Path:
    """Return the folder of checkpoints that `--save` means."""
    if save.exists() and not save.is_dir():
        raise CheckpointError(f"--save {save} is a file, expected a directory")
    iteration = read_record(source).iteration
    named = iteration_of(save.name)
    if named is not None and named != iteration:
        raise CheckpointError(f"--save {save}: the checkpoint is of iteration {iteration}")
    root = save if named is None else save.parent
    if root.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"--save {save} lies inside the checkpoint {source}; give another")
    final = root / iteration_name(iteration)
    if final.exists():  # said before the source is read
        raise CheckpointError(f"--save: {final} is there already; give another folder")
    return root


def _vocab_size(record: CheckpointRecord, source: Path) -> int:
    size = record.state.get("vocab_size")
    if not isinstance(size, int):
        raise CheckpointError(
            f"{source / RECORD_NAME} holds no vocab_size, so the model's sizes are unknown"
            f"{advice(source)}"
        )
    return size


# ------------------------------------------------------------------------------ target layout


def target_run(
    record: CheckpointRecord, target: TargetLayout, source: Path
) -> tuple[RunConfig, Layout, list[str]]:
    """Return a checkpoint's run at another layout, and what the user should know about it.

    Args:
        record: of the checkpoint.
        target: the new layout.
        source: the checkpoint, for messages.

    Raises:
        ConfigurationError: the model does not fit; the sizes that would are named.
        CheckpointError: the record holds no usable configuration.
    """
    try:
        saved = RunConfig.from_dict(record.config)
    except ConfigurationError as error:
        raise CheckpointError(
            f"{source / RECORD_NAME} holds an unusable config: {error}{advice(source)}"
        ) from None
    # With all its defaults, also where a section was left out.
    record = dataclasses.replace(record, config=saved.model_dump(mode="json"))
    vocab_size = _vocab_size(record, source)
    try:
        config, layout = _fit(record, target, vocab_size)
    except ConfigurationError as error:
        allowed = _allowed(record, target, vocab_size)
        raise ConfigurationError(f"{error}; {allowed}" if allowed else str(error)) from None
    notes = []
    if saved.parallel.sequence_parallel and not config.parallel.sequence_parallel:
        notes.append("--sequence-parallel is off: it needs tensor parallelism")
    try:
        config.layout(layout.world_size)
    except ConfigurationError as error:
        notes.append(f"to train at this layout, change a flag: {error}")
    return config, layout, notes


def _fit(
    record: CheckpointRecord, target: TargetLayout, vocab_size: int
) -> tuple[RunConfig, Layout]:
    values = copy.deepcopy(record.config)
    sizes = dataclasses.asdict(target)
    del sizes["replicate_size"]
    values["parallel"] |= sizes
    # Derived from the sizes: no tensor depends on them.
    values["parallel"]["sequence_parallel"] &= target.tensor_model_parallel_size > 1
    if target.replicate_size > 1:
        values["parallel"]["use_distributed_optimizer"] = False
    config = RunConfig.from_dict(values)
    unsharded = shard_problem(config.model, target.fsdp_size)
    if unsharded is not None:
        raise ConfigurationError(unsharded)  # a run's advice depends on its number of processes
    dp = target.fsdp_size * target.replicate_size
    # The batch is the next run's business: one that fits, whatever the layout.
    training = config.training.model_copy(
        update={
            "micro_batch_size": 1,
            "global_batch_size": dp * target.pipeline_model_parallel_size,
            "rampup_batch_size": None,
            "recompute_num_layers": None,
        }
    )
    layout = build_layout(config.model, config.parallel, training, target.world_size)
    ModelShape.from_config(config, vocab_size)
    return config, layout


def _allowed(record: CheckpointRecord, target: TargetLayout, vocab_size: int) -> str:
    """Return which single changes of the target would fit, as the end of a message."""
    found = []
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "fsdp_size"):
        fits = []
        for size in _TRIED:
            try:
                _fit(record, dataclasses.replace(target, **{field: size}), vocab_size)
            except ConfigurationError:
                continue
            fits.append(str(size))
        # A size that rules nothing out has nothing to do with the refusal.
        if fits and len(fits) < len(_TRIED):
            found.append(f"--{field.replace('_', '-')} {', '.join(fits)}")
    if not found:
        return ""
    tried = f"of {_TRIED[0]} to {_TRIED[-1]}"
    return f"allowed with the other sizes as they are ({tried}): {' or '.join(found)}"
