"""Scale state that differs between ranks, moved to another number of ranks.

With `--fp8-reduce-amax false` every rank keeps its own scales. They are stored together as
`fp8_local.<module>.<role>.scale` [dp, tp] and `.amax_history` [dp, tp, H]. On n ranks instead of m,
rank j of n takes from those of the m whose share of [0, 1) overlaps its own share
[j / n, (j + 1) / n):

    n < m   several merge: histories by element-wise maximum, scales are those of merged histories
    n > m   one is copied to several
    n = m   each keeps its own

The largest amaxes are what one rank would have had that saw all tensors. Where a merged history
does not tell its scale (it is empty, or an inf froze it), the smallest of the ranks' is taken.
"""

import dataclasses

import torch
from torch import Tensor

from megafp8.checkpoint.record import TensorEntry
from megafp8.config import Layout
from megafp8.errors import CheckpointError

SHARED_PREFIX = "fp8."
LOCAL_PREFIX = "fp8_local."

_MAXIMUM, _SCALES = "element-wise maximum", "(scales of the merged histories)"


def sources(index: int, parts: int, others: int) -> range:
    """Return which of `others` ranks the rank `index` of `parts` takes from."""
    return range(index * others // parts, -(-(index + 1) * others // parts))


def move_ranks(name: str, tensor: Tensor, dp: int, tp: int) -> Tensor:
    """Return the state of a tensor on dp x tp ranks.

    Args:
        name: ends with `.scale` or `.amax_history`.
        tensor: [dp before, tp before, ...].
        dp: data-parallel ranks now.
        tp: tensor-parallel ranks now.

    Returns:
        [dp, tp, ...].
    """
    merge = torch.amin if name.endswith(".scale") else torch.amax
    for axis, parts in ((0, dp), (1, tp)):
        others = tensor.shape[axis]
        taken = []
        for index in range(parts):
            found = sources(index, parts, others)
            taken.append(merge(tensor.narrow(axis, found.start, len(found)), dim=axis))
        tensor = torch.stack(taken, axis)
    return tensor


def describe_move(name: str, before: tuple[int, ...], dp: int, tp: int) -> str:
    """Return what `move_ranks` does, in words; "kept" where it does nothing."""
    merged = f"merged {_SCALES}" if name.endswith(".scale") else f"merged by {_MAXIMUM}"
    parts = []
    for axis, old, new in (("dp", before[0], dp), ("tp", before[1], tp)):
        if old > new:
            parts.append(f"{axis} {old} -> {new} {merged}")
        elif old < new:
            parts.append(f"{axis} {old} -> {new} copied")
    return ", ".join(parts) or "kept"


def local_entry(name: str, entry: TensorEntry, dp: int, tp: int) -> TensorEntry:
    """Return the shape that a tensor of a checkpoint has on dp x tp ranks.

    Raises:
        CheckpointError: it is of ranks by its name and has no axes for them.
    """
    if not name.startswith(LOCAL_PREFIX):
        return entry
    if len(entry.shape) < 2 or 0 in entry.shape:
        raise CheckpointError(f"{name} has shape {list(entry.shape)}, expected [dp, tp, ...]")
    return dataclasses.replace(entry, shape=(dp, tp, *entry.shape[2:]))


def describe_ranks(before: tuple[int, ...], layout: Layout, reduced: bool) -> str:
    """Return what a run does with the scales of dp x tp other ranks, in words.

    Args:
        before: (dp, tp) of the ranks that saved.
        layout: of the run that loads.
        reduced: its ranks share their scales.
    """
    dp, tp = (1, 1) if reduced else layout.scale_ranks
    how = describe_move("amax_history", before, dp, tp)
    if how == "kept":
        return "each rank keeps its own" if not reduced else "those of the only rank"
    return how.replace(_MAXIMUM, f"{_MAXIMUM} {_SCALES}")
