"""Hugging Face folders: opened as a view, written from one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint.files import sync_directory, write_atomically
from megafp8.config import ModelShape
from megafp8.convert.carried import (
    CONFIG_NAME,
    copy_carried,
    data_section,
    end_of_document,
    find_carried,
)
from megafp8.convert.hf_config import choose_model_type, describe, to_hf_config
from megafp8.convert.hf_fields import Fields, read_json
from megafp8.convert.hf_folder import left_out, refuse_half_a_model
from megafp8.convert.hf_names import GPT2_PREFIX, is_buffer, routes
from megafp8.convert.routes import Route
from megafp8.convert.safetensors_files import (
    INDEX_NAME,
    SCALES_NAME,
    Described,
    SafetensorsFolder,
    SafetensorsWriter,
    into_shards,
    shard_names,
)
from megafp8.convert.view import Checksums, ModelView, listed, make_config
from megafp8.errors import CheckpointError

HEAD = "lm_head.weight"
FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def open_hf(
    folder: Path, seq_length: int | None, divisible_by: int, ignored: Collection[str]
) -> ModelView:
    """Open a folder of `config.json` and safetensors.

    Args:
        folder: of the model.
        seq_length: context of the configuration that is made; None chooses.
        divisible_by: padding of the vocabulary.
        ignored: fields of `config.json` that the user wants ignored.

    Raises:
        CheckpointError: anything missing, damaged, unknown or unsupported, by name; before a
            tensor is read.
    """
    refuse_half_a_model(folder)
    hf_config = read_json(folder / CONFIG_NAME)
    told = describe(Fields(folder / CONFIG_NAME, hf_config, ignored), seq_length, divisible_by)
    files = SafetensorsFolder(folder)
    prefix = _prefix(told.model_type, files.entries)
    dtype = _dtype(folder, files.entries)
    rows = -(-told.vocab_size // divisible_by) * divisible_by
    data = data_section(folder, told.vocab_size, rows)
    config = make_config(folder, told.model, data, dtype)
    shape = ModelShape.from_config(config, told.vocab_size)
    by_name = {route.ours: route for route in routes(told.model_type, shape)}
    check_stored(folder, files.entries, by_name.values(), prefix, told.tied)

    def read_stored(name: str) -> Tensor:
        return files.read(stored_name(name, prefix)).to(dtype)

    def read(name: str) -> Tensor:
        route = by_name[name]
        return route.join([read_stored(theirs) for theirs in route.theirs])

    notes = []
    if told.tied and HEAD in files.entries:
        (embedding,) = next(iter(by_name.values())).theirs
        tables = files.read(HEAD), files.read(stored_name(embedding, prefix))
        if not torch.equal(*(table.float() for table in tables)):
            raise CheckpointError(
                f"{folder}: tie_word_embeddings is true, but {HEAD} differs from {embedding}"
            )
        notes.append(f"{HEAD} is the embedding once more (tie_word_embeddings): stored once")
    buffers = [name for name in files.names if is_buffer(name)]
    if buffers:
        notes.append(f"{len(buffers)} constants are left out, no weights: {listed(buffers)}")
    if (folder / SCALES_NAME).is_file():
        notes.append(f"FP8 scale state is left out, scales start anew: {SCALES_NAME}")
    others = left_out(folder, files.files)
    if others:
        notes.append(f"{len(others)} other files are left out: {listed(others)}")
    kinds = {str(entry.dtype).removeprefix("torch.") for entry in files.entries.values()}
    if len(kinds) > 1:
        notes.append(f"weights are {', '.join(sorted(kinds))}: float32 holds them all")
    return ModelView(
        path=folder,
        config=config,
        shape=shape,
        dtype=dtype,
        read=read,
        carried=find_carried(folder),
        hf_config=hf_config,
        notes=tuple(notes),
    )


def _prefix(model_type: str, names: Collection[str]) -> str:
    """GPT-2's first files leave out `transformer.` before every name."""
    bare = model_type == "gpt2" and not any(name.startswith(GPT2_PREFIX) for name in names)
    return GPT2_PREFIX if bare else ""


def stored_name(name: str, prefix: str) -> str:
    """A tensor's name as this folder spells it."""
    return name.removeprefix(prefix) if prefix else name


def _dtype(folder: Path, entries: Mapping[str, Described]) -> torch.dtype:
    """The dtype of all weights; fp32 holds them all where they differ."""
    found = {entry.dtype for entry in entries.values()}
    if not found <= set(FLOATING):
        other = next(name for name, entry in entries.items() if entry.dtype not in FLOATING)
        allowed = ", ".join(str(dtype) for dtype in FLOATING)
        raise CheckpointError(f"{folder}: {other} is {entries[other].dtype}; allowed: {allowed}")
    return found.pop() if len(found) == 1 else torch.float32


def check_stored(
    folder: Path,
    entries: Mapping[str, Described],
    by_name: Iterable[Route],
    prefix: str,
    tied: bool,
) -> None:
    """Compare what is stored with what the model consists of.

    Raises:
        CheckpointError: names that are missing or unknown, and shapes that differ.
    """
    wanted = {
        stored_name(name, prefix): shape
        for route in by_name
        for name, shape in zip(route.theirs, route.shapes, strict=True)
    }
    missing = sorted(wanted.keys() - entries.keys())
    extra = sorted(name for name in entries.keys() - wanted.keys() if name != HEAD)
    problems = []
    if HEAD in missing:
        problems.append(f"tie_word_embeddings is false and {HEAD} is missing")
    for what, names in (("missing", missing), ("unknown", extra)):
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            problems.append(f"{len(names)} {what}: {', '.join(names[:10])}{more}")
    problems += [
        f"{name} has shape {list(entries[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in entries and entries[name].shape != shape
    ][:10]
    if HEAD in entries and HEAD not in wanted and not tied:
        problems.append(f"{HEAD} is unknown")
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")


@dataclass(frozen=True)
class Item:
    """What one parameter becomes in the files.

    Attributes:
        entries: name -> shape and dtype.
        produce: makes the tensors, in the order of `entries`.
    """

    entries: dict[str, Described]
    produce: Callable[[], Sequence[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(entry.nbytes for entry in self.entries.values())


@dataclass
class Written:
    """What a writer put down, for the verification and the last line.

    Attributes:
        checksums: of the values that were written.
        tensors: in the files.
        bytes: in the files.
        what: the format in words.
    """

    checksums: Checksums
    tensors: int = 0
    bytes: int = 0
    what: str = ""
    notes: list[str] = field(default_factory=list)


def plain_items(
    view: ModelView, model_type: str, dtype: torch.dtype, exact: bool, sums: Checksums
) -> list[Item]:
    """Every parameter under its Hugging Face names in one dtype.

    Args:
        view: the model.
        model_type: whose names.
        dtype: of the files.
        exact: refuse values that `dtype` cannot hold.
        sums: is told each parameter's values when they are produced.
    """

    def item(route: Route) -> Item:
        entries = {
            name: Described(shape, dtype)
            for name, shape in zip(route.theirs, route.shapes, strict=True)
        }

        def produce() -> list[Tensor]:
            ours = cast_weights(view, route.ours, dtype, exact)
            sums.add(route.ours, ours)
            return route.split(ours)

        return Item(entries, produce)

    return [item(route) for route in routes(model_type, view.shape)]


def cast_weights(view: ModelView, name: str, dtype: torch.dtype, exact: bool) -> Tensor:
    """One parameter in another dtype.

    Raises:
        CheckpointError: values are not finite; `exact`, and they would change; or they lie beyond
            the range of `dtype`.
    """
    before = view.read(name)
    bad = before.numel() - int(before.isfinite().sum())
    if bad:
        raise CheckpointError(
            f"{view.path}: {name} holds {bad} values that are not finite: no weights of a model"
        )
    after = before.to(dtype)
    if exact and not torch.equal(after.to(before.dtype), before):
        raise CheckpointError(
            f"{view.path}: {name} holds values that {dtype} does not; give --dtype"
        )
    if not after.isfinite().all():
        raise CheckpointError(f"{view.path}: {name} holds values beyond the range of {dtype}")
    return after


def write_hf(
    view: ModelView,
    target: Path,
    model_type: str,
    dtype: torch.dtype,
    items: Sequence[Item],
    extra_config: Mapping[str, Any],
    max_shard_bytes: int,
    advance: Callable[[int], None],
    written: Written,
) -> None:
    """Write a folder that transformers and inference engines load.

    Args:
        view: the model.
        target: a new, empty folder.
        model_type: from `choose_model_type`.
        dtype: named in `config.json`.
        items: tensors, in order.
        extra_config: further fields for `config.json`.
        max_shard_bytes: a file is no larger, unless one parameter is.
        advance: told the bytes of each item.
        written: filled in.
    """
    ranges = list(into_shards([item.nbytes for item in items], max_shard_bytes))
    names = shard_names(len(ranges))
    owners: dict[str, str] = {}
    for name, chosen in zip(names, ranges, strict=True):
        part = [items[i] for i in chosen]
        entries = {key: entry for item in part for key, entry in item.entries.items()}
        owners |= dict.fromkeys(entries, name)
        _write_shard(target / name, entries, part, advance)
        written.tensors += len(entries)
    written.bytes = sum(item.nbytes for item in items)
    if len(names) > 1:
        index = {"metadata": {"total_size": written.bytes}, "weight_map": owners}
        write_atomically(target / INDEX_NAME, json.dumps(index, indent=2) + "\n")
    copy_carried(view.carried, target)
    eos = None if view.hf_config else end_of_document(view.config)
    values = to_hf_config(
        view.config.model, model_type, view.shape.vocab_size, dtype, view.hf_config, eos
    )
    values |= extra_config
    write_atomically(target / CONFIG_NAME, json.dumps(values, indent=2) + "\n")
    sync_directory(target)


def _write_shard(
    path: Path,
    entries: Mapping[str, Described],
    items: Sequence[Item],
    advance: Callable[[int], None],
) -> None:
    writer = SafetensorsWriter(path, entries)
    try:
        for item in items:
            for name, tensor in zip(item.entries, item.produce(), strict=True):
                writer.write(name, tensor)
            advance(item.nbytes)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def preferred_type(view: ModelView) -> str:
    """The Hugging Face architecture to write a model as."""
    return choose_model_type(view.config.model, view.hf_config.get("model_type"))
