"""Collectives and their gradients: each pair is tested as the other's adjoint.

For a linear map f between stacks of tensors (one per rank), <f(x), y> = <x, f*(y)> for all x and y,
where autograd gives f*(y). A replicated tensor counts once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.parallel import CommGroup, Traffic
from megafp8.parallel.collectives import (
    FLOAT8,
    LINEAR_KINDS,
    OTHER_KINDS,
    copy_to_group,
    gather_sequence,
    reduce_from_group,
    scatter_sequence,
)
from megafp8.parallel.traffic import summarize

SHAPE = (8, 3, 5)  # [s, b, h]


def world_group() -> CommGroup:
    return CommGroup(dist.group.WORLD, Traffic())


def summed(value: Tensor) -> Tensor:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inner_products(name: str) -> tuple[float, float]:
    """(<f(x), y>, <x, f*(y)>), both over all ranks."""
    function: Callable[..., Tensor] = {
        "copy": copy_to_group,
        "reduce": reduce_from_group,
        "gather": gather_sequence,
        "scatter": scatter_sequence,
    }[name]
    group, rank, size = world_group(), dist.get_rank(), dist.get_world_size()
    local = (SHAPE[0] // size, *SHAPE[1:])
    # `copy` starts from and `reduce` ends at a replicated tensor; all others differ by rank.
    x = numbers(7 if name == "copy" else 10 + rank, *(local if name == "gather" else SHAPE))
    x.requires_grad_(True)
    y = numbers(8 if name == "reduce" else 20 + rank, *(local if name == "scatter" else SHAPE))
    result = function(x, group)
    assert result.shape == y.shape
    result.backward(y)
    left, right = (result.detach() * y).sum(), (x.detach() * x.grad).sum()
    left = left if name == "reduce" else summed(left)
    right = right if name == "copy" else summed(right)
    return float(left), float(right)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["copy", "reduce", "gather", "scatter"])
def test_gradient_is_the_adjoint(ranks, name, size):
    answers = ranks.run(inner_products, world_size=size, name=name)
    left, right = answers[0]
    assert abs(left) > 1e-3 and left == pytest.approx(right, rel=1e-12)
    assert all(answer == pytest.approx(answers[0]) for answer in answers)


def conjugates() -> dict[str, bool]:
    """Whether the backward of each is the forward of its conjugate."""
    group, rank, size = world_group(), dist.get_rank(), dist.get_world_size()
    whole = numbers(20 + rank, *SHAPE)
    part = numbers(30 + rank, SHAPE[0] // size, *SHAPE[1:])

    def backward(function: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        leaf = torch.zeros_like(x).requires_grad_(True)
        function(leaf, group).backward(y)
        assert leaf.grad is not None
        return leaf.grad

    total = sum(numbers(20 + other, *SHAPE) for other in range(size))
    together = torch.cat(
        [numbers(30 + other, SHAPE[0] // size, *SHAPE[1:]) for other in range(size)]
    )
    mine = total.chunk(size)[rank]
    return {
        "copy forward": torch.equal(copy_to_group(whole, group), whole),
        "reduce forward": torch.allclose(reduce_from_group(whole, group), total),
        "gather forward": torch.equal(gather_sequence(part, group), together),
        "scatter forward": torch.allclose(scatter_sequence(whole, group), mine),
        "copy backward": torch.allclose(backward(copy_to_group, whole, whole), total),
        "reduce backward": torch.equal(backward(reduce_from_group, whole, whole), whole),
        "gather backward": torch.allclose(backward(gather_sequence, part, whole), mine),
        "scatter backward": torch.equal(backward(scatter_sequence, whole, part), together),
    }


def test_conjugates(ranks):
    for answer in ranks.run(conjugates):
        assert all(answer.values()), answer


def inputs_kept() -> list[bool]:
    """Whether collectives leave their inputs, and gradients handed to them, as they were."""
    group, kept = world_group(), []
    for function in (copy_to_group, reduce_from_group, gather_sequence, scatter_sequence):
        x = numbers(dist.get_rank(), *SHAPE)
        copy, leaf = x.clone(), x.requires_grad_(True)
        y = function(leaf, group)
        gradient = torch.ones_like(y)
        y.backward(gradient)
        kept += [torch.equal(leaf, copy), bool((gradient == 1).all())]
    return kept


def test_inputs_are_not_written_to(ranks):
    for answer in ranks.run(inputs_kept, world_size=2):
        assert answer == [True] * 8


def strided_inputs() -> list[bool]:
    """Gathers and reductions of views that are not contiguous."""
    group, rank = world_group(), dist.get_rank()
    wide = numbers(rank, 5, 8)
    other = numbers(1 - rank, 5, 8)
    pair = [wide, other] if rank == 0 else [other, wide]
    gathered = group.all_gather(wide.t(), OTHER_KINDS[0])
    scattered, _ = group.reduce_scatter(wide.t(), OTHER_KINDS[1])
    reduced = reduce_from_group(wide.t(), group)
    total = (wide + other).t()
    return [
        torch.equal(gathered, torch.cat([t.t() for t in pair])),
        torch.allclose(scattered, total.chunk(2)[rank]),
        torch.allclose(reduced, total),
    ]


def test_any_strides(ranks):
    assert ranks.run(strided_inputs, world_size=2) == [[True] * 3] * 2


def float8_gathers() -> list[tuple[bool, dict[str, dict[str, int]]]]:
    """All 256 codes of each format, gathered; and the traffic counted for it."""
    group, found = world_group(), []
    codes = torch.arange(256).to(torch.uint8)
    for dtype in FLOAT8:
        mine = codes.roll(dist.get_rank()).view(dtype)
        full = group.all_gather(mine, LINEAR_KINDS[0])
        wanted = torch.cat([codes.roll(r) for r in range(group.size)])
        same = full.dtype == dtype and torch.equal(full.view(torch.uint8), wanted)
        counted = summarize(torch.tensor([group.traffic.drain()]))[0]
        found.append((same, counted))
    return found


def test_float8_travels_as_bytes(ranks):
    """gloo has no float8; NaN codes and -0 arrive too. A rank sends 3/4 of 1024 bytes."""
    for answer in ranks.run(float8_gathers):
        assert answer == [(True, {"tp_linear_all_gather": {"uint8": 768}})] * len(FLOAT8)


def counted() -> tuple[Any, Any]:
    """Bytes and calls of one of each, forward and backward, on fp32 [8, 3, 5]."""
    group, size = world_group(), dist.get_world_size()
    x = torch.ones(SHAPE, requires_grad=True)
    copy_to_group(x, group).sum().backward()
    reduce_from_group(x, group).sum().backward()
    scatter_sequence(x, group).sum().backward()
    gather_sequence(x[: SHAPE[0] // size], group).sum().backward()
    group.all_reduce(torch.zeros(10), "loss", dist.ReduceOp.MAX)
    return summarize(torch.tensor([group.traffic.drain()]))


def test_bytes_by_the_direct_algorithm(ranks):
    full = 8 * 3 * 5 * 4  # 480 bytes
    wanted_bytes = {
        "tp_all_reduce": {"float32": 2 * (2 * full * 3 // 4)},
        "tp_other_all_gather": {"float32": 2 * (full * 3 // 4)},
        "tp_other_reduce_scatter": {"float32": 2 * (full * 3 // 4)},
        "loss": {"float32": 2 * 40 * 3 // 4},
    }
    wanted_calls = {
        "tp_all_reduce": 2,
        "tp_other_all_gather": 2,
        "tp_other_reduce_scatter": 2,
        "loss": 1,
    }
    assert ranks.run(counted) == [(wanted_bytes, wanted_calls)] * 4


def test_a_group_of_one_does_nothing():
    """No process group is needed, nothing is copied, nothing is counted."""
    group = CommGroup(None, Traffic())
    x = torch.randn(SHAPE, requires_grad=True)
    for function in (copy_to_group, reduce_from_group, gather_sequence, scatter_sequence):
        assert function(x, group) is x
    assert group.all_reduce(x, "loss") is None
    assert group.all_gather(x, "tp_other_all_gather") is x
    assert group.reduce_scatter(x, "tp_other_reduce_scatter") == (x, None)
    assert (group.size, group.rank) == (1, 0) and not any(group.traffic.drain())
