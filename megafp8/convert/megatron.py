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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megafp8.checkpoint.files import METADATA_NAME, sync_directory, write_atomically
from megafp8.checkpoint.kinds import found_instead
from megafp8.checkpoint.metadata import read_metadata, read_objects
from megafp8.config import ModelShape, ParameterSpec, load_config
from megafp8.config.shape import EMBEDDING, OUTPUT
from megafp8.convert.carried import copy_carried
from megafp8.convert.dcp_reader import DcpTensors
from megafp8.convert.dcp_writer import Piece, write_dcp
from megafp8.convert.hf import FLOATING, Written, cast_weights, check_stored
from megafp8.convert.hf_fields import read_json
from megafp8.convert.megatron_args import from_args, refusal, to_args
from megafp8.convert.megatron_legacy import (
    EXTRA_STATE,
    LegacyTensors,
    legacy_folders,
    notes_of,
)
from megafp8.convert.megatron_names import LAYERS, NORMS, canonical
from megafp8.convert.routes import Route, same, vocabulary
from megafp8.convert.safe_pickle import load_pickled, settings_of
from megafp8.convert.safetensors_files import Described
from megafp8.convert.view import ModelView, make_config
from megafp8.errors import CheckpointError

COMMON_NAME = "common.pt"
JSON_NAME = "metadata.json"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
RELEASE = "release"
VERSIONS = (2.0, 3.0)
# Linears for which Megatron stores a state of its own beside the weights; empty without FP8.
_STATEFUL = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")


class Store(Protocol):
    """Tensors under canonical names with global layer numbers, in Megatron's shapes."""

    entries: dict[str, Described]
    notes: list[str]

    def read(self, name: str) -> Tensor:
        """One tensor."""
        ...


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
    source = ranks[0] / "model_optim_rng.pt" if ranks else folder / COMMON_NAME
    common = load_pickled(source)
    _check_version(source, common, bool(ranks))
    args = settings_of(common["args"], source) if _has_args(common) else {}
    model, vocab = _model(source, args, config_file, seq_length, divisible_by)
    if ranks:
        store: Store = LegacyTensors(folder, ranks, args, model)
    else:
        store = DistTensors(folder)
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
    by_name = {route.ours: route for route in _routes(shape, rows)}
    check_stored(folder, store.entries, by_name.values(), "", shape.tied)

    def read(name: str) -> Tensor:
        return by_name[name].join([store.read(name).to(dtype)])

    return ModelView(
        path=folder, config=config, shape=shape, dtype=dtype, read=read, notes=tuple(store.notes)
    )


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


def _check_version(source: Path, common: Any, legacy: bool) -> None:
    """Refuse what Megatron would reorder: version 1 fused queries, keys and values otherwise.

    Args:
        source: the file, for messages.
        common: its content.
        legacy: of the form that may be so old; without a version it is, to Megatron.

    Raises:
        CheckpointError: the version is not one of VERSIONS.
    """
    version = common.get("checkpoint_version") if isinstance(common, dict) else None
    if version in VERSIONS or (version is None and not legacy):
        return
    found = "is missing" if version is None else f"is {version!r:.40}"
    allowed = ", ".join(map(str, VERSIONS))
    raise CheckpointError(f"{source}: checkpoint_version {found}; allowed: {allowed}")


def _has_args(common: Any) -> bool:
    return isinstance(common, dict) and common.get("args") is not None


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
        self._tensors = DcpTensors(folder, metadata)
        self.entries: dict[str, Described] = {}
        self._where: dict[str, tuple[str, int | None]] = {}
        objects = read_objects(folder, sizes)
        extra = [key for key in metadata.state_dict_metadata if EXTRA_STATE in key]
        extra += [
            key
            for key, place in objects.items()
            if EXTRA_STATE in key and self._tensors.holds_data(place)
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
    return [_route(spec, shape, rows) for spec in shape.parameters()]


def _route(spec: ParameterSpec, shape: ModelShape, rows: int) -> Route:
    if spec.name in (EMBEDDING, OUTPUT):
        return vocabulary(spec, shape, spec.name, rows)
    gated = shape.swiglu and ".mlp.linear_fc1." in spec.name
    merged = (spec.shape[0] * spec.shape[1], *spec.shape[2:]) if gated else spec.shape
    return same(spec, spec.name, merged)


def write_megatron(
    view: ModelView,
    target: Path,
    dtype: torch.dtype,
    exact: bool,
    advance: Callable[[int], None],
    written: Written,
) -> None:
    """Write `release/` in the `torch_dist` form, layers stacked as Megatron-core writes them.

    Args:
        view: the model.
        target: a new, empty folder.
        dtype: of the weights.
        exact: refuse values that `dtype` cannot hold.
        advance: told the bytes of each tensor.
        written: filled in.

    Raises:
        CheckpointError: Megatron cannot compute this model; says why.
    """
    reason = refusal(view.config.model)
    if reason is not None:
        raise CheckpointError(f"{view.path}: {reason}")
    shape, folder = view.shape, target / RELEASE
    folder.mkdir()
    routes = {route.ours: route for route in _routes(shape, shape.padded_vocab_size)}
    pieces = {_piece(spec, routes[spec.name], shape, dtype): spec for spec in shape.parameters()}

    def produce(piece: Piece) -> Tensor:
        name = pieces[piece].name
        ours = cast_weights(view, name, dtype, exact)
        written.checksums.add(name, ours)
        advance(ours.nbytes)
        return routes[name].split(ours)[0].view(piece.sizes)

    buffer = io.BytesIO()
    torch.save([None], buffer)  # Megatron-core stores a list of the objects under a key
    empty = buffer.getvalue()
    count = shape.num_layers
    objects = {
        f"{LAYERS}{module}._extra_state/shard_{layer}_{count}": empty
        for module in _STATEFUL
        for layer in range(count)
    }
    write_dcp(folder, list(pieces), produce, objects)
    settings = to_args(view.config.model, shape, dtype)
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
    write_atomically(target / TRACKER_NAME, RELEASE)
    copy_carried(view.carried, target / "tokenizer")
    written.tensors = len({piece.name for piece in pieces})
    written.bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert (folder / METADATA_NAME).is_file()


def _piece(spec: ParameterSpec, route: Route, shape: ModelShape, dtype: torch.dtype) -> Piece:
    (sizes,) = route.shapes
    if spec.layer is None:
        return Piece.whole(spec.name, sizes, dtype)
    rest = spec.name.removeprefix(f"{LAYERS}{spec.layer}.")
    for theirs, ours in NORMS.items():
        rest = theirs + rest.removeprefix(ours) if rest.startswith(ours) else rest
    offsets = (spec.layer, *(0 for _ in sizes))
    return Piece(LAYERS + rest, (shape.num_layers, *sizes), dtype, offsets, (1, *sizes))
