"""Our own checkpoints: opened as a view, written from one so that `--load` takes them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
import yaml
from torch import Tensor

from megafp8.checkpoint.files import (
    LATEST_NAME,
    RECORD_NAME,
    iteration_name,
    reading,
    sync_directory,
    write_atomically,
)
from megafp8.checkpoint.find import advice, find_checkpoint
from megafp8.checkpoint.kinds import found_instead
from megafp8.checkpoint.rank_scales import LOCAL_PREFIX, SHARED_PREFIX
from megafp8.checkpoint.record import CheckpointRecord, TensorEntry
from megafp8.checkpoint.scale_checks import RankState, scale_problems
from megafp8.checkpoint.streaming import TensorReader
from megafp8.checkpoint.values import flaw, summary
from megafp8.config import ModelShape, RunConfig
from megafp8.config.names import SECTIONS
from megafp8.config.records import CheckpointConfig, LoggingConfig
from megafp8.convert.carried import (
    CONFIG_NAME,
    FOLDER,
    copy_carried,
    find_carried,
    run_folder,
    source_config,
)
from megafp8.convert.dcp_writer import Piece, write_dcp
from megafp8.convert.hf import Written, cast_weights
from megafp8.convert.safetensors_files import Described
from megafp8.convert.view import ModelView, find_spec, listed
from megafp8.errors import CheckpointError, ConfigurationError

SCALE_PREFIXES = (SHARED_PREFIX, LOCAL_PREFIX)
MASTER = torch.float32  # parameters are fp32 masters whatever the compute dtype


def open_native(load: Path) -> ModelView:
    """Open a checkpoint of any layout.

    Args:
        load: a folder of checkpoints or one of them (`--load`'s rules).

    Raises:
        CheckpointError: none there, partial, damaged, or not the tensors of its configuration; FP8
            scale state that is not whole, or does not fit its windows.
    """
    directory = find_checkpoint(load)
    if directory is None:
        raise CheckpointError(f"--load {load} holds no checkpoint{found_instead(load)}")
    tensors = TensorReader.open(directory)
    record = tensors.record
    config, shape = _sizes(directory, record)
    for name, spec in find_spec(shape).items():
        entry = record.tensors.get(name)
        expected = TensorEntry(spec.shape, "float32")
        if entry != expected:
            raise CheckpointError(f"{directory}: {name} is {entry}, expected {expected}")
    carried = run_folder(config, directory)
    scales = _ScaleState(tensors)
    return ModelView(
        path=directory,
        config=config,
        shape=shape,
        dtype=_source_dtype(record),
        read=tensors.read,
        scales=frozenset(scales.names),
        read_scale=scales.read,
        carried=() if carried is None else find_carried(carried),
        hf_config=source_config(carried),
        notes=tuple(_not_converted(record, find_spec(shape))) + scales.notes,
    )


def _not_converted(record: CheckpointRecord, specs: Collection[str]) -> Iterator[str]:
    rest = {n for n in record.tensors if n not in specs and not n.startswith(SCALE_PREFIXES)}
    moments = {name for name in rest if name.startswith("optimizer.")}
    if moments:
        yield f"optimizer state is not converted: {len(moments)} tensors are left out"
    if rest - moments:
        yield f"{len(rest - moments)} other tensors are left out: {listed(rest - moments)}"


class _ScaleState:
    """Scale state under the names of ranks that share it; that of ranks of their own is merged."""

    def __init__(self, tensors: TensorReader) -> None:
        self._tensors = tensors
        shared = {name for name in tensors.record.tensors if name.startswith(SHARED_PREFIX)}
        own = {name for name in tensors.record.tensors if name.startswith(LOCAL_PREFIX)}
        self._stored = {SHARED_PREFIX + name.removeprefix(LOCAL_PREFIX): name for name in own}
        both = shared & self._stored.keys()
        if both:
            raise CheckpointError(
                f"{tensors.directory}: {listed(both)} is stored both shared and for each rank"
            )
        self._stored |= {name: name for name in shared}
        with reading(tensors.directory):
            self._check()
        self.names = sorted(self._stored)
        self._ranks = RankState(tensors)
        self.notes: tuple[str, ...] = ()
        if own:
            self.notes = (
                f"scale state of each rank's own: {len(own)} tensors merge into one for all, "
                "histories by element-wise maximum (scales of the merged histories)",
            )

    def _check(self) -> None:
        tensors = self._tensors
        wrong = scale_problems(tensors)
        for name in sorted(self._stored.values()) if not wrong else ():
            if (found := flaw(name, tensors.read(name))) is not None:
                wrong.append(f"{tensors.file_of(name)}: {name} {found}")
        if wrong:
            raise CheckpointError(
                f"FP8 scale state is damaged: {summary(wrong)}{advice(tensors.directory)}"
            )

    def read(self, name: str) -> Tensor:
        """One tensor as a single rank has it."""
        stored = self._stored[name]
        value = self._tensors.read(stored)
        return self._ranks.moved(stored, value, 1, 1)[0, 0] if stored != name else value


def _sizes(directory: Path, record: CheckpointRecord) -> tuple[RunConfig, ModelShape]:
    try:
        config = RunConfig.from_dict(record.config)
        return config, ModelShape.from_config(config, int(record.state["vocab_size"]))
    except ConfigurationError as error:
        raise CheckpointError(f"{directory}: its configuration is unusable: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory}: megafp8.json lacks {error}") from None


def _source_dtype(record: CheckpointRecord) -> torch.dtype:
    """What an imported model was stored in; a trained one is its fp32 masters."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return named.get(str(record.state.get("source_dtype")), torch.float32)


def write_native(
    view: ModelView,
    target: Path,
    final: Path,
    advance: Callable[[int], None],
    written: Written,
) -> None:
    """Write iteration 0, `latest`, `config.yaml` and the tokenizer into a new folder.

    Args:
        view: the model.
        target: a new, empty folder.
        final: the folder's later name, which `config.yaml` mentions.
        advance: told the bytes of each tensor.
        written: filled in.
    """
    specs = find_spec(view.shape)
    entries = {name: Described(spec.shape, MASTER) for name, spec in specs.items()}
    scales = _kept_scales(view)
    entries |= {name: Described(tuple(value.shape), MASTER) for name, value in scales.items()}

    def produce(piece: Piece) -> Tensor:
        if piece.name in scales:
            return scales[piece.name]
        tensor = cast_weights(view, piece.name, MASTER, exact=True)
        written.checksums.add(piece.name, tensor)
        advance(tensor.nbytes)
        return tensor

    # No other name is needed meanwhile: `target` gets its own only when all is done.
    directory = target / iteration_name(0)
    directory.mkdir()
    pieces = [Piece.whole(name, entry.shape, MASTER) for name, entry in entries.items()]
    files = write_dcp(directory, pieces, produce)
    config = _final_config(view, final)
    record = CheckpointRecord(
        iteration=0,
        config=config.model_dump(mode="json"),
        layout={"world_size": 1, "tp": 1, "pp": 1, "vp": 1, "fsdp": 1, "replicate": 1}
        | {"pipeline_schedule": "1f1b"},
        data_position={"consumed_samples": 0},
        state={
            "vocab_size": view.shape.vocab_size,
            "source_dtype": str(view.dtype).removeprefix("torch."),
        },
        tensors={
            name: TensorEntry(entry.shape, "float32") for name, entry in sorted(entries.items())
        },
        files=dict(sorted(files.items())),
    )
    sync_directory(directory)
    write_atomically(directory / RECORD_NAME, record.to_json())
    write_atomically(target / LATEST_NAME, directory.name + "\n")
    written.notes.append(
        f"{final} holds weights and no optimizer state: pretrain_gpt.py --config "
        f"{shlex.quote(str(final / 'config.yaml'))} trains on from them (it sets --load and "
        "--finetune, and no FP8: --bf16 --fp8-format hybrid turns it on)"
    )
    written.tensors = len(entries)
    written.bytes = sum(entry.nbytes for entry in entries.values())
    if view.carried:
        copy_carried(view.carried, target / FOLDER)
    if view.hf_config:
        (target / FOLDER).mkdir(exist_ok=True)
        text = json.dumps(dict(view.hf_config), indent=2) + "\n"
        write_atomically(target / FOLDER / CONFIG_NAME, text)
    head = (
        "# Goes on from the imported weights. Give --data-path, and your own lr and train_iters.\n"
    )
    write_atomically(target / "config.yaml", head + yaml.safe_dump(_plain(config), sort_keys=False))


def _kept_scales(view: ModelView) -> dict[str, Tensor]:
    if view.read_scale is None:
        return {}
    return {name: view.read_scale(name) for name in sorted(view.scales)}


def _final_config(view: ModelView, final: Path) -> RunConfig:
    """The view's configuration with the names that its files will have."""
    config = view.config
    checkpoint = CheckpointConfig(load=str(final), finetune=True, exit_on_missing_checkpoint=True)
    data = config.data
    if data.tokenizer_model is not None and view.carried:
        tokenizer = final / FOLDER
        if not Path(data.tokenizer_model).is_dir():
            tokenizer /= Path(data.tokenizer_model).name
        data = data.model_copy(update={"tokenizer_model": str(tokenizer)})
    # Not the folders of the run that it may come from.
    changed = {"checkpoint": checkpoint, "data": data, "logging": LoggingConfig()}
    return config.model_copy(update=changed)


def _plain(config: RunConfig) -> dict[str, dict[str, object]]:
    """What differs from the defaults, by section; no section that has nothing of its own."""
    kept: dict[str, dict[str, object]] = {}
    for name, section in config.to_dict().items():
        fields = SECTIONS[name].model_fields
        values = {
            key: value
            for key, value in section.items()
            if (value != fields[key].default if key in fields else value)
        }
        if values:
            kept[name] = values
    return kept
