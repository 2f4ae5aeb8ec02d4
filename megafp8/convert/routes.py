"""How one parameter of ours is made of tensors of another format, and back.

A route is exact in both directions: values are moved, never computed. A format is a list of routes
and a store of tensors by name, from which a model is read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megafp8.config import ModelShape, ParameterSpec
from megafp8.config.shape import EMBEDDING, OUTPUT
from megafp8.convert.view import pad_rows
from megafp8.errors import CheckpointError

HEAD = "lm_head.weight"
FLOATING = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Described:
    """Shape and dtype of a tensor that is still in its file, or not made yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Store(Protocol):
    """Tensors of another format by its names."""

    entries: dict[str, Described]

    def read(self, name: str) -> Tensor:
        """One tensor."""
        ...


@dataclass(frozen=True)
class Route:
    """One parameter in two formats.

    Attributes:
        ours: canonical name.
        theirs: names in the other format, in the order that `join` takes.
        shapes: their shapes.
        join: their tensors -> ours.
        split: ours -> their tensors, contiguous.
    """

    ours: str
    theirs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], list[Tensor]]


def _one(
    spec: ParameterSpec,
    theirs: str,
    shape: tuple[int, ...],
    join: Callable[[Tensor], Tensor],
    split: Callable[[Tensor], Tensor],
) -> Route:
    return Route(
        spec.name,
        (theirs,),
        (shape,),
        lambda parts: join(parts[0]),
        lambda ours: [split(ours).contiguous()],
    )


def same(spec: ParameterSpec, theirs: str, shape: tuple[int, ...] | None = None) -> Route:
    """Equal elements in the same order; only the shape may differ."""
    target = spec.shape if shape is None else shape
    return _one(
        spec, theirs, target, lambda t: t.reshape(spec.shape), lambda ours: ours.reshape(target)
    )


def vocabulary(spec: ParameterSpec, shape: ModelShape, theirs: str, rows: int) -> Route:
    """A table with a row per token: `rows` on their side, padded with zeros on ours."""
    assert spec.name in (EMBEDDING, OUTPUT), spec.name
    tokens, padded = shape.vocab_size, shape.padded_vocab_size
    return _one(
        spec,
        theirs,
        (rows, *spec.shape[1:]),
        lambda table: pad_rows(table[:tokens], padded),
        lambda ours: pad_rows(ours[: min(rows, tokens)], rows),
    )


def transposed(spec: ParameterSpec, theirs: str) -> Route:
    """A matrix that the other format stores as (in, out); a vector is the same."""
    return _one(spec, theirs, spec.shape[::-1], lambda t: t.t().contiguous(), Tensor.t)


def separate_qkv(spec: ParameterSpec, shape: ModelShape, theirs: Sequence[str]) -> Route:
    """Queries, keys and values as three tensors: weights [heads * d, h] or biases [heads * d]."""
    return Route(
        spec.name,
        tuple(theirs),
        tuple((rows, *spec.shape[1:]) for rows in _qkv_rows(shape)),
        partial(join_qkv, shape=shape),
        partial(split_qkv, shape=shape),
    )


def stacked_qkv(spec: ParameterSpec, shape: ModelShape, theirs: str) -> Route:
    """All queries, all keys, all values in one tensor; a weight is (in, out)."""
    return _one(
        spec,
        theirs,
        spec.shape[::-1],
        lambda whole: join_qkv(whole.t().split(_qkv_rows(shape)), shape),
        lambda ours: torch.cat(split_qkv(ours, shape)).t(),
    )


def _qkv_rows(shape: ModelShape) -> list[int]:
    return [n * shape.head_dim for n in (shape.num_heads, shape.num_groups, shape.num_groups)]


def gate_and_up(spec: ParameterSpec, theirs: Sequence[str]) -> Route:
    """The halves of a gated fc1, [2, f, h] (biases [2, f]) with us, as two tensors."""
    return Route(
        spec.name,
        tuple(theirs),
        (spec.shape[1:],) * 2,
        lambda parts: torch.stack(list(parts)),
        lambda ours: [half.contiguous() for half in ours],
    )


def join_qkv(parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
    """[q; k; v] -> rows grouped by KV head: its queries, its key, its value."""
    groups, d = shape.num_groups, shape.head_dim
    q, k, v = (part.unflatten(0, (groups, -1, d)) for part in parts)
    return torch.cat([q, k, v], dim=1).flatten(0, 2)


def split_qkv(fused: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of `join_qkv`."""
    grouped = fused.unflatten(0, (shape.num_groups, -1, shape.head_dim))
    parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
    return [part.flatten(0, 2).contiguous() for part in parts]


def reader(
    folder: Path, store: Store, routes: Sequence[Route], dtype: torch.dtype, tied: bool
) -> Callable[[str], Tensor]:
    """Compare what is stored with what the model consists of.

    Args:
        folder: for messages.
        store: what is there.
        routes: of all parameters.
        dtype: of the weights.
        tied: whether a head of its own may be there, too.

    Returns:
        What reads a parameter by its canonical name.

    Raises:
        CheckpointError: names that are missing or unknown, and shapes that differ.
    """
    problems = _problems(store.entries, routes, tied)
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")
    by_name = {route.ours: route for route in routes}

    def read(name: str) -> Tensor:
        route = by_name[name]
        return route.join([store.read(theirs).to(dtype) for theirs in route.theirs])

    return read


def _problems(entries: Mapping[str, Described], routes: Sequence[Route], tied: bool) -> list[str]:
    wanted = {
        name: shape
        for route in routes
        for name, shape in zip(route.theirs, route.shapes, strict=True)
    }
    missing = sorted(wanted.keys() - entries.keys())
    extra = sorted(entries.keys() - wanted.keys() - {HEAD})
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
    return problems
