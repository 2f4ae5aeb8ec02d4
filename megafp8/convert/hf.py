"""Hugging Face folders: opened as a view, written from one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from megafp8.checkpoint.files import write_atomically
from megafp8.config import ModelShape
from megafp8.config.shape import EMBEDDING
from megafp8.convert.carried import (
    CONFIG_NAME,
    copy_carried,
    data_section,
    end_of_document,
    find_carried,
)
from megafp8.convert.fp8_export import BAKED, Fp8Export
from megafp8.convert.hf_config import choose_model_type, describe, to_hf_config
from megafp8.convert.hf_fields import Fields, read_json
from megafp8.convert.hf_folder import left_out, refuse_half_a_model
from megafp8.convert.hf_names import GPT2_PREFIX, is_buffer, routes
from megafp8.convert.items import Target, as_they_are, bar, nbytes
from megafp8.convert.routes import FLOATING, HEAD, Described, reader
from megafp8.convert.safetensors_files import (
    INDEX_NAME,
    SCALES_NAME,
    SafetensorsFolder,
    into_shards,
    write_safetensors,
)
from megafp8.convert.view import ModelView, listed, make_config
from megafp8.errors import CheckpointError


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
    fields = Fields(folder / CONFIG_NAME, hf_config, ignored)
    model, vocab_size = describe(fields, seq_length, divisible_by)
    files = SafetensorsFolder(folder)
    # GPT-2's first files leave out the prefix.
    prefix = GPT2_PREFIX if any(name.startswith(GPT2_PREFIX) for name in files.entries) else ""
    dtype = _dtype(folder, files.entries)
    rows = -(-vocab_size // divisible_by) * divisible_by
    config = make_config(folder, model, data_section(folder, vocab_size, rows), dtype)
    shape = ModelShape.from_config(config, vocab_size)
    found = routes(hf_config["model_type"], shape, prefix)
    read = reader(folder, files, found, dtype, shape.tied)
    notes = []
    if shape.tied and HEAD in files.entries:
        (embedding,) = next(route.theirs for route in found if route.ours == EMBEDDING)
        if not torch.equal(files.read(HEAD).float(), files.read(embedding).float()):
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


def _dtype(folder: Path, entries: Mapping[str, Described]) -> torch.dtype:
    """The dtype of all weights; fp32 holds them all where they differ."""
    found = {entry.dtype for entry in entries.values()}
    if not found <= set(FLOATING):
        other = next(name for name, entry in entries.items() if entry.dtype not in FLOATING)
        allowed = ", ".join(str(dtype) for dtype in FLOATING)
        raise CheckpointError(f"{folder}: {other} is {entries[other].dtype}; allowed: {allowed}")
    return found.pop() if len(found) == 1 else torch.float32


def export_of(view: ModelView, fp8: str) -> Fp8Export | None:
    """What of a model becomes FP8 where weights are baked; None for the other values of --fp8."""
    return Fp8Export(view, preferred_type(view), fp8) if fp8 in BAKED else None


def write_hf(target: Target, fp8: str, max_shard_bytes: int) -> None:
    """Write a folder that transformers and inference engines load.

    Args:
        target: where to.
        fp8: none, scales, or one of BAKED.
        max_shard_bytes: a file is no larger, unless one parameter is.

    Raises:
        CheckpointError: no architecture fits, or the model has nothing for `fp8`.
    """
    view, folder, model_type = target.view, target.folder, preferred_type(target.view)
    target.what = f"{model_type}, {str(target.dtype).removeprefix('torch.')}"
    baked = export_of(view, fp8)
    if baked is not None:
        items = baked.items(target)
        target.what += f", {len(baked.chosen)} linears in FP8 {fp8}"
        if target.dtype == torch.float32:
            target.notes.append(
                "what is not FP8 is float32, which engines may run in FP16 unless they are told "
                "another dtype; --dtype bf16 writes bfloat16"
            )
    else:
        items = target.items(routes(model_type, view.shape))
    target.bytes, owners = nbytes(items), {}
    with bar("writing", target.bytes) as advance:
        shards = into_shards(items, max_shard_bytes)
        for name, part in shards.items():
            write_safetensors(folder / name, part, advance)
            owners |= {tensor: name for item in part for tensor in item.entries}
        target.tensors = len(owners)
        if len(shards) > 1:
            index = {"metadata": {"total_size": target.bytes}, "weight_map": owners}
            write_atomically(folder / INDEX_NAME, json.dumps(index, indent=2) + "\n")
        if fp8 == "scales":
            if not view.scales:
                raise CheckpointError(f"--fp8 scales: {view.path} holds no FP8 scale state")
            write_safetensors(folder / SCALES_NAME, as_they_are(view.scales), advance)
            count = len(view.scales)
            target.notes.append(f"{count} tensors of FP8 scale state in {SCALES_NAME}")
    copy_carried(view.carried, folder)
    eos = None if view.hf_config else end_of_document(view.config)
    values = to_hf_config(
        view.config.model, model_type, view.shape.vocab_size, target.dtype, view.hf_config, eos
    )
    values |= {} if baked is None else baked.config()
    write_atomically(folder / CONFIG_NAME, json.dumps(values, indent=2) + "\n")


def preferred_type(view: ModelView) -> str:
    """The Hugging Face architecture to write a model as."""
    return choose_model_type(view.config.model, view.hf_config.get("model_type"))
