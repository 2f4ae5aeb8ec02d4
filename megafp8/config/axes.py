"""The axes of the grid of ranks, one row each: sizes, rank order, groups and texts follow from it.

A further axis is a further row; what computes with it asks for it by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megafp8.config.parallel import ParallelConfig


@dataclass(frozen=True)
class Axis:
    """One way in which ranks share the work.

    Attributes:
        name: in texts, records and meshes.
        field: of `ParallelConfig` that gives its size.
        order: place in the rank order; neighbouring ranks differ in the axis of order 0.
        groups: whose ranks differ in it:
            "dp": each takes its own part of a batch; the sizes follow from the world size.
            "stage": they hold the same pipeline stages and agree on their scales.
            "loss": the loss and the tokens are sums over them.
            "tied": its two ends hold one copy each of a tied embedding.
        scale_dim: dimension of [dp, tp, ...] along which ranks of a stage keep scales of their own
            with `--no-fp8-reduce-amax`; None where they do not.
        alone: whether a single rank has a group along it, too: at every size tensors are placed
            on the axis, or a schedule sends along it.
    """

    name: str
    field: str
    order: int
    groups: Set[str]
    scale_dim: int | None = None
    alone: bool = False


# In the order in which texts name them.
AXES = (
    Axis("tp", "tensor_model_parallel_size", 0, {"stage"}, scale_dim=1, alone=True),
    Axis("pp", "pipeline_model_parallel_size", 4, {"loss", "tied"}, alone=True),
    Axis("cp", "context_parallel_size", 1, {"stage", "loss"}, scale_dim=0),
    Axis("fsdp", "fsdp_size", 2, {"dp", "stage", "loss"}, scale_dim=0, alone=True),
    Axis("replicate", "replicate_size", 3, {"dp", "stage", "loss"}, scale_dim=0, alone=True),
)
# Slowest first, as the dimensions of a mesh.
RANK_ORDER = tuple(axis.name for axis in sorted(AXES, key=lambda axis: -axis.order))
# What the flags say; data parallel takes the ranks that are left.
GIVEN = tuple(axis for axis in AXES if "dp" not in axis.groups)
# Degrees of a layout in texts and records: pipeline ranks hold `vp` chunks each.
DEGREES = tuple(
    name for axis in AXES for name in ((axis.name, "vp") if axis.name == "pp" else (axis.name,))
)


def axes_of(group: str) -> tuple[str, ...]:
    """Return the axes in which the ranks of a group differ, slowest first."""
    members = {axis.name for axis in AXES if group in axis.groups}
    return tuple(name for name in RANK_ORDER if name in members)


def scale_axes(dim: int) -> tuple[str, ...]:
    """Return the axes along a dimension of [dp, tp, ...], slowest first."""
    members = {axis.name for axis in AXES if axis.scale_dim == dim}
    return tuple(name for name in RANK_ORDER if name in members)


def given_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Return the sizes of all axes but those of data parallel."""
    return {axis.name: getattr(parallel, axis.field) for axis in GIVEN}


def smallest_world(parallel: object) -> int:
    """Return the fewest ranks that sizes allow; those that are left open, or unknown, count 1.

    Args:
        parallel: has sizes under the names of `Axis.field`.
    """
    return math.prod(getattr(parallel, axis.field, None) or 1 for axis in AXES)


def product(sizes: Mapping[str, int]) -> str:
    """Return sizes as a product in words: `tp 2 * pp 4`."""
    return " * ".join(f"{name} {size}" for name, size in sizes.items())
