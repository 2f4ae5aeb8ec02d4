"""Megatron-core's `torch_dist` checkpoints, read and written, and its older ones, read.

Names are Megatron's own with global layer numbers, so ours but for three things: layers may be
stacked along a first dimension, norms bear TransformerEngine's names inside the linear behind
them, and a gated fc1 is [2f, h] instead of [2, f, h].
"""

from __future__ import annotations

import io
import json
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafp8.checkpoint.files import sync_directory, write_atomically
from megafp8.checkpoint.kinds import found_instead
from megafp8.checkpoint.metadata import read_metadata, read_objects
from megafp8.checkpoint.reader import ShardReader
from megafp8.config import ModelShape, ParameterSpec, load_config
from megafp8.config.shape import EMBEDDING, OUTPUT, linear_names
from megafp8.convert.carried import copy_carried
from megafp8.convert.dcp_reader import holds_data
from megafp8.convert.dcp_writer import write_dcp
from megafp8.convert.hf_fields import read_json
from megafp8.convert.items import Target, bar, nbytes
from megafp8.convert.megatron_args import from_args, refusal, to_args
from megafp8.convert.megatron_legacy import FILE_NAME, LegacyTensors, legacy_folders
from megafp8.convert.megatron_names import EXTRA_STATE, LAYERS, NORMS, canonical, notes_of
from megafp8.convert.routes import FLOATING, Described, Route, reader, same, vocabulary
from megafp8.convert.safe_pickle import load_pickled, settings_of
from megafp8.convert.view import ModelView, make_config
from megafp8.errors import CheckpointError

COMMON_NAME = "common.pt"
JSON_NAME = "metadata.json"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"
VERSIONS = (2.0, 3.0)
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")


def open_megatron(
    load: Path, config_file: Path | None, seq_length: int | None, divisible_by: int
) -> ModelView:
    """Open a checkpoint.

    Args:
        load: folder with `latest_checkpointed_iteration.txt`, or one checkpoint in it.
        config_file: YAML of ours that describes the model, where the checkpoint holds no args.
        seq_length: context of the configuration that is made.
        divisible_by: padding of the vocabulary.

    Raises:
        CheckpointError: anything missing, damaged, unknown or unsupported, by name.
    """
    folder = _find(load)
    ranks = legacy_folders(folder)
    if not ranks and not (folder / COMMON_NAME).is_file():
        raise CheckpointError(
            f"--load {load} holds neither {COMMON_NAME} nor mp_rank_*"
            f"{found_instead(load, 'megatron')}"
        )
    source = ranks[0] / FILE_NAME if ranks else folder / COMMON_NAME
    common = load_pickled(source)
    common = common if isinstance(common, dict) else {}
    _check_version(source, common.get("checkpoint_version"), bool(ranks))
    stored = common.get("args")
    args = {} if stored is None else settings_of(stored, source)
    model, vocab = _model(source, args, config_file, seq_length, divisible_by)
    store = LegacyTensors(folder, ranks, args, model) if ranks else DistTensors(folder)
    rows = store.entries[EMBEDDING].shape[0] if EMBEDDING in store.entries else 0
    vocab = vocab or rows
    if not 0 < vocab <= rows:
        raise CheckpointError(f"{folder}: {EMBEDDING} has {rows} rows, expected at least {vocab}")
    kinds = {entry.dtype for entry in store.entries.values()}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32
    if dtype not in FLOATING:
        raise CheckpointError(f"{folder}: weights are {dtype}; allowed: {FLOATING}")
    config = make_config(folder, model, {"vocab_size": vocab}, dtype)
    shape = ModelShape.from_config(config, vocab)
    read = reader(folder, store, _routes(shape, rows), dtype, shape.tied)
    return ModelView(folder, config, shape, dtype, read, notes=tuple(store.notes))


def _find(load: Path) -> Path:
    if not load.is_dir():
        raise CheckpointError(f"--load {load} holds no checkpoint{found_instead(load, 'megatron')}")
    tracker = load / TRACKER_NAME
    if not tracker.is_file():
        return load
    named = tracker.read_text(encoding="utf-8", errors="replace").strip()
    name = named if named == RELEASE else f"iter_{int(named):07d}" if named.isdecimal() else ""
    if not name or not (load / name).is_dir():
        raise CheckpointError(f"{tracker} names {named[:40]!r}, and that checkpoint is not there")
    return load / name


def _check_version(source: Path, version: Any, legacy: bool) -> None:
    """Refuse what Megatron would reorder: version 1 fused queries, keys and values otherwise."""
    # Without a version a file of the old form is of version 0, to Megatron.
    if version in VERSIONS or (version is None and not legacy):
        return
    found = "is missing" if version is None else f"is {version!r:.40}"
    allowed = ", ".join(map(str, VERSIONS))
    raise CheckpointError(f"{source}: checkpoint_version {found}; allowed: {allowed}")


def _model(
    source: Path,
    args: Mapping[str, Any],
    config_file: Path | None,
    seq_length: int | None,
    divisible_by: int,
) -> tuple[dict[str, Any], int | None]:
    """Section `model` and the vocabulary size, from the settings or from a file."""
    if config_file is not None:
        if args:
            raise CheckpointError(
                f"--config {config_file}: {source} holds the model's args, which count; leave "
                "--config out"
            )
        config = load_config(["--config", str(config_file)])
        return config.model.model_dump(), config.known_vocab_size
    if not args:
        raise CheckpointError(f"{source} holds no args; describe the model with --config FILE.yaml")
    return from_args(source, args, seq_length, divisible_by), args.get("vocab_size")


class DistTensors:
    """The model's tensors of a `torch_dist` folder."""

    def __init__(self, folder: Path) -> None:
        told = read_json(folder / JSON_NAME)
        if told.get("sharded_backend") != "torch_dist":
            raise CheckpointError(
                f"{folder / JSON_NAME}: sharded_backend is {told.get('sharded_backend')!r}; "
                "allowed: torch_dist"
            )
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
        metadata = read_metadata(folder, sizes, foreign=True)
        self._tensors = ShardReader(folder, metadata)
        self.entries: dict[str, Described] = {}
        self._where: dict[str, tuple[str, int | None]] = {}
        objects = read_objects(folder, sizes)
        extra = [key for key in metadata.state_dict_metadata if EXTRA_STATE in key]
        extra += [
            key
            for key, place in objects.items()
            if EXTRA_STATE in key and holds_data(self._tensors, place)
        ]
        names = [*metadata.state_dict_metadata, *objects]
        self.notes = notes_of([n for n in names if n.startswith("optimizer.")], extra)
        for key, entry in metadata.state_dict_metadata.items():
            if not key.startswith(_MODEL_PREFIXES) or EXTRA_STATE in key:
                continue
            assert isinstance(entry, TensorStorageMetadata), key
            shape, dtype = tuple(entry.size), entry.properties.dtype
            rest = key.removeprefix(LAYERS)
            if not key.startswith(LAYERS) or re.match(r"\d+\.", rest):
                self._add(folder, canonical(key), key, None, Described(shape, dtype))
                continue
            for layer in range(shape[0] if shape else 0):
                name = canonical(f"{LAYERS}{layer}.{rest}")
                self._add(folder, name, key, layer, Described(shape[1:], dtype))

    def _add(self, folder: Path, name: str, key: str, layer: int | None, entry: Described) -> None:
        if name in self._where:
            raise CheckpointError(f"{folder}: {key} and {self._where[name][0]} are both {name}")
        self._where[name], self.entries[name] = (key, layer), entry

    def read(self, name: str) -> Tensor:
        """One tensor of one layer."""
        return self._tensors.read(*self._where[name])


def _routes(shape: ModelShape, rows: int) -> list[Route]:
    def route(spec: ParameterSpec) -> Route:
        if spec.name in (EMBEDDING, OUTPUT):
            return vocabulary(spec, shape, spec.name, rows)
        gated = shape.swiglu and ".mlp.linear_fc1." in spec.name
        merged = (spec.shape[0] * spec.shape[1], *spec.shape[2:]) if gated else spec.shape
        return same(spec, spec.name, merged)

    return [route(spec) for spec in shape.parameters()]


def write_megatron(target: Target) -> None:
    """Write `release/` in the `torch_dist` form, layers stacked as Megatron-core writes them.

    Raises:
        CheckpointError: Megatron cannot compute this model; says why.
    """
    view, shape, folder = target.view, target.view.shape, target.folder / RELEASE
    reason = refusal(view.config.model)
    if reason is not None:
        raise CheckpointError(f"{view.path}: {reason}")
    folder.mkdir()
    buffer = io.BytesIO()
    torch.save([None], buffer)  # Megatron-core stores a list of the objects under a key
    # Of linears Megatron stores a state of its own beside the weights; empty without FP8.
    stateful = [item.name.removeprefix(f"{LAYERS}0.") for item in linear_names(1, shape.swiglu)]
    objects = {
        f"{LAYERS}{module}.{EXTRA_STATE}/shard_{layer}_{shape.num_layers}": buffer.getvalue()
        for module in stateful
        for layer in range(shape.num_layers)
    }
    items = target.items(_routes(shape, shape.padded_vocab_size))
    with bar("writing", nbytes(items)) as advance:
        write_dcp(folder, items, advance, _place, shape.num_layers, objects)
    settings = to_args(view.config.model, shape, target.dtype)
    common = {"args": Namespace(**settings), "checkpoint_version": 3.0, "iteration": 0}
    torch.save(common, folder / COMMON_NAME)
    told = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    write_atomically(folder / JSON_NAME, json.dumps(told))
    sync_directory(folder)
    write_atomically(target.folder / TRACKER_NAME, RELEASE)
    copy_carried(view.carried, target.folder / "tokenizer")
    target.tensors = len({_place(name)[0] for item in items for name in item.entries})
    target.bytes = sum(path.stat().st_size for path in folder.iterdir())


def _place(name: str) -> tuple[str, int | None]:
    """Where a tensor is stored: `decoder.layers.3.x` is row 3 of `decoder.layers.x`."""
    if not name.startswith(LAYERS):
        return name, None
    layer, _, rest = name.removeprefix(LAYERS).partition(".")
    for theirs, ours in NORMS.items():
        rest = theirs + rest.removeprefix(ours) if rest.startswith(ours) else rest
    return LAYERS + rest, int(layer)
