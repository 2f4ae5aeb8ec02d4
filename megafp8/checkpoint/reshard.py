"""Changing a checkpoint's layout without its ranks: in one process, streaming, all accounted for.

The global view of all tensors stays what it is. Only scale state that differs between ranks
depends on the layout; the rule for it is in `rank_scales`.
"""

import copy
import dataclasses
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.files import (
    METADATA_NAME,
    crc32_of,
    iteration_name,
    iteration_of,
    remove_directory,
)
from megafp8.checkpoint.holdings import plan_holdings
from megafp8.checkpoint.load import find_checkpoint
from megafp8.checkpoint.rank_scales import LOCAL_PREFIX, describe_move, local_entry, move_ranks
from megafp8.checkpoint.record import CheckpointRecord, FileEntry, TensorEntry
from megafp8.checkpoint.save import _commit, _make_temporary
from megafp8.checkpoint.streaming import (
    BUFFER_BYTES,
    Holding,
    ShardWriter,
    TensorReader,
    bytes_of,
    crc32_of_tensor,
    in_order,
)
from megafp8.config import Layout, ModelShape, RunConfig
from megafp8.config.layout import build_layout
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
        degrees = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return degrees * self.fsdp_size * self.replicate_size


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
        "tp": layout.tp,
        "pp": layout.pp,
        "vp": layout.vp,
        "fsdp": layout.fsdp,
        "replicate": layout.replicate,
        "pipeline_schedule": layout.schedule,
    }


def describe_layout(layout: Layout) -> str:
    """Return a layout as words."""
    return (
        f"{layout.world_size} ranks: tp {layout.tp} x pp {layout.pp} (vp {layout.vp}) x fsdp "
        f"{layout.fsdp} x replicate {layout.replicate}"
    )


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
        raise CheckpointError(f"--load {load} holds no checkpoint")
    root, final = _destination(source, Path(save).absolute())
    reader = TensorReader.open(source, checksums=True)
    config, layout, notes = target_run(reader.record, target)
    shape = ModelShape.from_config(config, _vocab_size(reader.record))
    entries = {
        name: local_entry(name, entry, layout.dp, layout.tp)
        for name, entry in reader.record.tensors.items()
    }
    holdings = plan_holdings(entries, shape, layout)
    record = dataclasses.replace(
        reader.record,
        config=config.model_dump(mode="json"),
        layout=layout_fields(layout),
        tensors=dict(sorted(entries.items())),
    )
    made = _missing_folders(root)
    try:
        rows = _write(reader, root, final, record, holdings)
    except BaseException as error:
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise CheckpointError(
                f"{final} could not be written: {reason}; nothing is left of it"
            ) from error
        raise
    return ReshardReport(source, final, layout, notes, rows)


def _write(
    reader: TensorReader,
    root: Path,
    final: Path,
    record: CheckpointRecord,
    holdings: Sequence[Holding],
) -> list[Conserved]:
    """Write everything into a temporary folder, read it again, and only then give it its name."""
    root.mkdir(parents=True, exist_ok=True)
    temporary = _make_temporary(root, final.name)
    try:
        moved, files = _copy_tensors(reader, temporary, record, holdings)
        index = temporary / METADATA_NAME
        files[METADATA_NAME] = FileEntry(size=index.stat().st_size, crc32=crc32_of(index))
        record = dataclasses.replace(record, files=dict(sorted(files.items())))
        rows = _compare(reader, TensorReader(temporary, record), moved)
        _commit(temporary, final, record)
    finally:
        if temporary.exists():
            remove_directory(temporary)
    return rows


# Checksums of a tensor as it was read and as it has to come out again.
_Sums = dict[str, tuple[str, str]]


def _copy_tensors(
    reader: TensorReader, folder: Path, record: CheckpointRecord, holdings: Sequence[Holding]
) -> tuple[_Sums, dict[str, FileEntry]]:
    writer = ShardWriter(folder, record.tensors, holdings)
    sums: _Sums = {}
    writing: deque[tuple[int, list[Future[None]]]] = deque()
    held = 0

    def read(name: str) -> tuple[str, Tensor, str, str]:
        tensor = reader.read(name)
        before = crc32_of_tensor(tensor)
        if not name.startswith(LOCAL_PREFIX):
            return name, tensor, before, before
        dp, tp = record.tensors[name].shape[:2]
        tensor = move_ranks(name, tensor, dp, tp)
        return name, tensor, before, crc32_of_tensor(tensor)

    try:
        sizes = [(name, bytes_of(reader.entry(name))) for name in reader.names]
        for name, tensor, before, wanted in in_order(sizes, read, BUFFER_BYTES // 2):
            sums[name] = before, wanted
            while writing and held + tensor.nbytes > BUFFER_BYTES // 2:
                size, done = writing.popleft()
                for future in done:
                    future.result()
                held -= size
            writing.append((tensor.nbytes, writer.write(name, tensor)))
            held += tensor.nbytes
        for _, done in writing:
            for future in done:
                future.result()
        return sums, writer.finish()
    finally:
        writer.close()


def _compare(source: TensorReader, copy: TensorReader, sums: _Sums) -> list[Conserved]:
    """Read what was written and compare it with what was read.

    Raises:
        CheckpointError: a tensor is missing or has other bytes; all are named.
    """
    sizes = [(name, bytes_of(copy.entry(name))) for name in source.names]
    found = in_order(sizes, lambda name: (name, crc32_of_tensor(copy.read(name))))
    rows, lost = [], []
    for name, after in found:
        before, wanted = sums[name]
        entry, new = source.entry(name), copy.entry(name)
        rule = "kept"
        if name.startswith(LOCAL_PREFIX):
            rule = describe_move(name, entry.shape, *new.shape[:2])
        rows.append(Conserved(name, entry, new, before, after, rule))
        if after != wanted:
            lost.append(f"{name} (crc32 {wanted} -> {after})")
    if lost:
        raise CheckpointError(f"{len(lost)} tensors were not conserved: {', '.join(lost[:20])}")
    return rows


def _destination(source: Path, save: Path) -> tuple[Path, Path]:
    """Return the folder of checkpoints and the new checkpoint's directory."""
    if save.exists() and not save.is_dir():
        raise CheckpointError(f"--save {save} is a file, expected a directory")
    iteration = iteration_of(source.name)
    if iteration is None:
        iteration = TensorReader.open(source, checksums=False).record.iteration
    root = save.parent if iteration_of(save.name) is not None else save
    final = root / iteration_name(iteration)
    if root != save and save != final:
        raise CheckpointError(f"--save {save}: the checkpoint is of iteration {iteration}")
    if final.exists():
        raise CheckpointError(f"--save: {final} is there already; give another folder")
    return root, final


def _missing_folders(path: Path) -> list[Path]:
    """Return the folders that have to be made for `path`, deepest first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _vocab_size(record: CheckpointRecord) -> int:
    size = record.state.get("vocab_size")
    if not isinstance(size, int):
        raise CheckpointError("megafp8.json holds no vocab_size, so the model's sizes are unknown")
    return size


# ------------------------------------------------------------------------------ target layout


def target_run(
    record: CheckpointRecord, target: TargetLayout
) -> tuple[RunConfig, Layout, list[str]]:
    """Return a checkpoint's run at another layout, and what the user should know about it.

    Raises:
        ConfigurationError: the model does not fit; the sizes that would are named.
        CheckpointError: the record holds no usable configuration.
    """
    try:
        saved = RunConfig.from_dict(record.config)
    except ConfigurationError as error:
        raise CheckpointError(f"megafp8.json holds an unusable config: {error}") from None
    vocab_size = _vocab_size(record)
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
    return f"allowed with the other sizes as they are: {' or '.join(found)}" if found else ""
