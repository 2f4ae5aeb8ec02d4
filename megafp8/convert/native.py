"""Our own checkpoints: opened as a view, written from one so that `--load` takes them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator
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
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.record import CheckpointRecord, TensorEntry
from megafp8.checkpoint.reshard import layout_fields
from megafp8.checkpoint.scale_checks import RankState, scale_problems
from megafp8.checkpoint.values import flaw, summary
from megafp8.config import Layout, ModelShape, RunConfig
from megafp8.config.checkpoint import CheckpointConfig
from megafp8.config.logging import LoggingConfig
from megafp8.config.names import SECTIONS
from megafp8.convert.carried import (
    CONFIG_NAME,
    FOLDER,
    copy_carried,
    find_carried,
    run_folder,
    source_config,
)
from megafp8.convert.dcp_writer import write_dcp
from megafp8.convert.items import Target, as_they_are, bar, nbytes
from megafp8.convert.routes import same
from megafp8.convert.view import DTYPES, ModelView, listed
from megafp8.errors import CheckpointError, ConfigurationError


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
    specs = {spec.name: spec.shape for spec in shape.parameters()}
    for name, sizes in specs.items():
        entry, expected = record.tensors.get(name), TensorEntry(sizes, "float32")
        if entry != expected:
            raise CheckpointError(f"{directory}: {name} is {entry}, expected {expected}")
    carried = run_folder(config, directory)
    named = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    notes = [*_not_converted(record, specs)]
    scales = _scale_state(tensors, notes)
    return ModelView(
        path=directory,
        config=config,
        shape=shape,
        # What an imported model was stored in; a trained one is its fp32 masters.
        dtype=named.get(str(record.state.get("source_dtype")), torch.float32),
        read=tensors.read,
        scales=scales,
        carried=() if carried is None else find_carried(carried),
        hf_config=source_config(carried),
        notes=tuple(notes),
    )


def _not_converted(record: CheckpointRecord, specs: Collection[str]) -> Iterator[str]:
    rest = {
        n
        for n in record.tensors
        if n not in specs and not n.startswith((SHARED_PREFIX, LOCAL_PREFIX))
    }
    moments = {name for name in rest if name.startswith("optimizer.")}
    if moments:
        yield f"optimizer state is not converted: {len(moments)} tensors are left out"
    if rest - moments:
        yield f"{len(rest - moments)} other tensors are left out: {listed(rest - moments)}"


def _scale_state(tensors: TensorReader, notes: list[str]) -> dict[str, Tensor]:
    """Scale state under the names of ranks that share it; that of ranks of their own is merged."""
    names = [name for name in tensors.names if name.startswith((SHARED_PREFIX, LOCAL_PREFIX))]
    own = [name for name in names if name.startswith(LOCAL_PREFIX)]
    with reading(tensors.directory):
        wrong = scale_problems(tensors)
        # Copies: what `read` returns keeps its file open.
        values = {name: tensors.read(name).clone() for name in names if not wrong}
        for name, value in values.items():
            if (found := flaw(name, value)) is not None:
                wrong.append(f"{tensors.file_of(name)}: {name} {found}")
        if wrong:
            raise CheckpointError(
                f"FP8 scale state is damaged: {summary(wrong)}{advice(tensors.directory)}"
            )
        ranks = RankState(tensors)
        for name in own:
            values[name] = ranks.moved(name, values[name], 1, 1)[0, 0]
    if own:
        notes.append(
            f"scale state of each rank's own: {len(own)} tensors merge into one for all, "
            "histories by element-wise maximum (scales of the merged histories)"
        )
    inner = sorted((name.partition(".")[2], name) for name in names)
    return {SHARED_PREFIX + module: values[name] for module, name in inner}


def _sizes(directory: Path, record: CheckpointRecord) -> tuple[RunConfig, ModelShape]:
    try:
        config = RunConfig.from_dict(record.config)
        return config, ModelShape.from_config(config, int(record.state["vocab_size"]))
    except ConfigurationError as error:
        raise CheckpointError(f"{directory}: its configuration is unusable: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory}: megafp8.json lacks {error}") from None


def write_native(target: Target) -> None:
    """Write iteration 0, `latest`, `config.yaml` and the tokenizer into a new folder.

    Args:
        target: where to; its dtype is that of the masters, fp32.
    """
    view, folder, final = target.view, target.folder, target.final
    # No other name is needed meanwhile: the folder gets its own only when all is done.
    directory = folder / iteration_name(0)
    directory.mkdir()
    items = target.items(same(spec, spec.name) for spec in view.shape.parameters())
    items += as_they_are(view.scales)
    target.bytes = nbytes(items)
    with bar("writing", target.bytes) as advance:
        files = write_dcp(directory, items, advance)
    entries = {name: entry for item in items for name, entry in item.entries.items()}
    target.tensors = len(entries)
    config = _final_config(view, final)
    record = CheckpointRecord(
        iteration=0,
        config=config.model_dump(mode="json"),
        layout=layout_fields(Layout(layers_per_stage=view.shape.num_layers)),
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
    write_atomically(folder / LATEST_NAME, directory.name + "\n")
    target.notes.append(
        f"{final} holds weights and no optimizer state: pretrain_gpt.py --config "
        f"{shlex.quote(str(final / 'config.yaml'))} trains on from them (it sets --load and "
        "--finetune, and no FP8: --bf16 --fp8-format hybrid turns it on)"
    )
    if view.carried:
        copy_carried(view.carried, folder / FOLDER)
    if view.hf_config:
        (folder / FOLDER).mkdir(exist_ok=True)
        text = json.dumps(dict(view.hf_config), indent=2) + "\n"
        write_atomically(folder / FOLDER / CONFIG_NAME, text)
    head = (
        "# Goes on from the imported weights. Give --data-path, and your own lr and train_iters.\n"
    )
    write_atomically(folder / "config.yaml", head + yaml.safe_dump(_plain(config), sort_keys=False))


def _final_config(view: ModelView, final: Path) -> RunConfig:
    """The view's configuration with the names that its files will have."""
    config = view.config
    checkpoint = CheckpointConfig(load=str(final), finetune=True, exit_on_missing_checkpoint=True)
    data = config.data
    if data.tokenizer_model is not None and view.carried:
        one = Path(data.tokenizer_model)
        tokenizer = final / FOLDER if one.is_dir() else final / FOLDER / one.name
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
