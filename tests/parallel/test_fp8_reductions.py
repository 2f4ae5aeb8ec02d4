"""Sums over ranks with FP8 on the wire: what they equal, and that no delay changes a bit."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.numerics import E4M3, decode_row, encode_rows
from megafp8.parallel import CommGroup, Traffic
from megafp8.parallel.collectives import LINEAR_KINDS
from megafp8.parallel.fsdp import Fp8ReduceScatter
from megafp8.parallel.traffic import summarize
from tests.support.ranks import Ranks

KIND = "fsdp_block_reduce_scatter"
LENGTH = 1000  # of a shard: three blocks of 256 and a shorter one
SUM = dist.ReduceOp.SUM


def gradients(rank: int, step: int = 0) -> Tensor:
    """What a rank hands to the reduction, fp32 [size * LENGTH], of very different sizes."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    values = torch.randn(dist.get_world_size(), LENGTH, generator=generator)
    return (values * 10.0 ** torch.arange(-4, 4).repeat_interleave(125)).flatten()


def reduced(reduction: Fp8ReduceScatter, values: Tensor) -> Tensor:
    shard = reduction.allocate((LENGTH,), dtype=torch.float32, device=values.device)
    assert dist.group.WORLD is not None
    assert reduction(shard, values.clone(), dist.group.WORLD, SUM) is None
    return shard


def sums() -> tuple[Tensor, Tensor, Tensor, int]:
    """(found, the same by hand, fp32 sum, bytes)."""
    traffic, rank, size = Traffic(), dist.get_rank(), dist.get_world_size()
    found = reduced(Fp8ReduceScatter(traffic, KIND, False), gradients(rank))
    sent = summarize(torch.tensor([traffic.drain()]))
    wanted, exact = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for source in range(size):
        mine = gradients(source).view(size, LENGTH)[rank]
        cast = decode_row(encode_rows(mine[None], E4M3)[0], LENGTH, E4M3)
        wanted += mine if source == rank else cast
        exact += mine
    assert sent[1] == {KIND: 1} and set(sent[0][KIND]) == {"uint8"}
    return found, wanted, exact, sent[0][KIND]["uint8"]


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_summed_in_rank_order(ranks: Ranks, size: int) -> None:
    for found, wanted, exact, sent in ranks.run(sums, world_size=size):
        assert torch.equal(found, wanted)
        error = (found - exact).view(8, 125).norm(dim=1) / exact.view(8, 125).norm(dim=1)
        assert float(error.max()) < 0.04, "relative to each decade of sizes"
        assert sent == (size - 1) * (LENGTH + 4 * 4)
        assert sent <= 0.27 * 4 * LENGTH * (size - 1)


def delayed_sums(runs: int) -> list[bytes]:
    found = []
    for number in range(runs):
        dist.barrier()
        generator = random.Random(1000 * number + dist.get_rank())
        time.sleep(generator.uniform(0.0, 0.02))
        shard = reduced(Fp8ReduceScatter(Traffic(), KIND, False), gradients(dist.get_rank()))
        found.append(shard.numpy().tobytes())
    return found


def test_arrival_order_changes_no_bit(ranks: Ranks) -> None:
    """20 runs, every rank late by a time of its own in each."""
    for found in ranks.run(delayed_sums, world_size=4, runs=20):
        assert len(found) == 20 and set(found) == {found[0]}


def faulty(bad: float) -> list[list[int]]:
    """Where the shard is not finite, with the fault in the own part and in one that travels."""
    rank, size, places = dist.get_rank(), dist.get_world_size(), []
    for owner in (rank, (rank + 1) % size):
        values = gradients(rank).view(size, LENGTH)
        if rank == 0:
            values[owner, 300] = bad
        shard = reduced(Fp8ReduceScatter(Traffic(), KIND, True), values.flatten())
        places.append((~shard.isfinite()).nonzero().flatten().tolist())
    return places


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_faults_are_not_saturated_away(ranks: Ranks, bad: float) -> None:
    """The value itself shows, in its place: the gradient norm and the report by name need it."""
    first, second = ranks.run(faulty, world_size=2, bad=bad)
    assert (first, second) == ([[300], []], [[], [300]])


def fed_back() -> tuple[float, float, float]:
    """Relative error of the sum of 20 reductions without and with feedback; after a reset."""
    rank, size, errors = dist.get_rank(), dist.get_world_size(), []
    exact = torch.zeros(LENGTH)
    steady = sum(gradients(source).view(size, LENGTH)[rank] for source in range(size))
    for feedback in (False, True):
        reduction = Fp8ReduceScatter(Traffic(), KIND, feedback)
        found = sum(reduced(reduction, gradients(rank)) for _ in range(20))
        exact = 20 * steady
        errors.append(float((found - exact).norm() / exact.norm()))
        assert (reduction.residual is not None) == feedback
    before = reduced(Fp8ReduceScatter(Traffic(), KIND, True), gradients(rank))
    assert reduction.residual is not None and bool((reduction.residual[rank] == 0).all())
    reduction.forget()
    return errors[0], errors[1], float((reduced(reduction, gradients(rank)) - before).abs().max())


def test_error_feedback_makes_up_for_what_casts_lose(ranks: Ranks) -> None:
    """The same gradient 20 times: casts alone err the same way each time."""
    for without, fed, reset in ranks.run(fed_back, world_size=2):
        assert fed < 0.1 * without, (without, fed)
        assert reset == 0.0, "nothing is left of a dropped gradient"


def fault_and_feedback() -> bool:
    reduction = Fp8ReduceScatter(Traffic(), KIND, True)
    values = gradients(dist.get_rank())
    values[::7] = float("inf")
    reduced(reduction, values)
    assert reduction.residual is not None
    return bool(reduction.residual.isfinite().all())


def test_a_fault_leaves_no_residual_behind(ranks: Ranks) -> None:
    assert all(ranks.run(fault_and_feedback, world_size=2))


def scatter_of_activations(later: bool) -> tuple[Tensor, Tensor, Tensor, Any]:
    """(found, by hand, exact in fp32, bytes) of bf16 [8, 3, 128]."""
    traffic, rank, size = Traffic(), dist.get_rank(), dist.get_world_size()
    group = CommGroup(dist.group.WORLD, traffic)

    def partial(source: int) -> Tensor:
        generator = torch.Generator().manual_seed(source)
        return torch.randn(8, 3, 128, generator=generator).bfloat16()

    found, work = group.reduce_scatter_fp8(partial(rank), LINEAR_KINDS[1], E4M3, later)
    assert (work is not None) == later
    if work is not None:
        work.wait()
    wanted, exact = torch.zeros(8 // size, 3, 128), torch.zeros(8 // size, 3, 128)
    for source in range(size):
        mine = partial(source).chunk(size)[rank]
        cast = decode_row(encode_rows(mine.reshape(1, -1), E4M3)[0], mine.numel(), E4M3)
        wanted += mine if source == rank else cast.view(mine.shape)
        exact += mine
    return found, wanted.bfloat16(), exact, summarize(torch.tensor([traffic.drain()]))


@pytest.mark.parametrize("later", [False, True])
def test_activations_are_summed_in_fp32(ranks: Ranks, later: bool) -> None:
    for found, wanted, exact, sent in ranks.run(scatter_of_activations, world_size=2, later=later):
        assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)
        assert float((found - exact).norm() / exact.norm()) < 0.03
        elements = 8 * 3 * 128 // 2
        assert sent == (
            {LINEAR_KINDS[1]: {"uint8": elements + elements // 64}},
            {LINEAR_KINDS[1]: 1},
        )
        assert sent[0][LINEAR_KINDS[1]]["uint8"] <= 0.52 * 2 * elements


def alone() -> bool:
    x = torch.randn(4, 8)
    shard, work = CommGroup(None, Traffic()).reduce_scatter_fp8(x, LINEAR_KINDS[1], E4M3)
    return shard is x and work is None


def test_a_group_of_one_sends_nothing(ranks: Ranks) -> None:
    assert ranks.run(alone, world_size=1) == [True]
