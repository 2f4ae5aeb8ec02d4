"""A pipeline schedule is an order of the same work: nothing runs twice, no bit changes.

A pipelined run has every loss, gradient norm, weight, moment and FP8 scale of one rank, bit for
bit, in FP8 and with clipping.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
from torch.profiler import ProfilerActivity, profile

import megafp8.layers.native.casting as casting
import megafp8.layers.native.operands as operands
from tests.support.layouts import (
    CASES,
    PARITY,
    PRECISIONS,
    SP,
    LayoutCase,
    degrees,
    merge_stages,
    start_training,
)
from tests.support.limits import slow
from tests.support.ranks import Ranks

BATCH, MICRO_BATCHES, LINEARS = ("--global-batch-size", "8"), 4, 4
ZBV = ("--pipeline-schedule", "zbv")
GPIPE = ("--pipeline-schedule", "gpipe")
INTERLEAVED = ("--num-layers-per-virtual-pipeline-stage", "1")
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
RECOMPUTE = ("--recompute-granularity", "full")
PIPELINES = [case for case in CASES if case.bounds("fp8", 20) == (0.0, 0.0)]


def trained(flags: tuple[str, ...], iterations: int) -> tuple[list[float], list[float], Any]:
    training = start_training((*PARITY, *flags))
    curve = training.iterate(iterations)
    # All of them were clipped: a last bit of the norm would be in every weight.
    assert min(curve.grad_norms) > training.config.optimizer.clip_grad
    return curve.losses, curve.grad_norms, training.digests()


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> Any:
    """One rank's training, by flags and iterations."""
    known: dict[tuple[Any, ...], Any] = {}

    def train(flags: tuple[str, ...], iterations: int) -> Any:
        key = (*flags, iterations)
        if key not in known:
            flags = (*flags, *degrees())
            known[key] = ranks.run(trained, world_size=1, flags=flags, iterations=iterations)[0]
        return known[key]

    return train


def check_one_rank(
    ranks: Ranks,
    alone: Any,
    size: int,
    flags: tuple[str, ...],
    more: tuple[str, ...],
    iterations: int,
) -> None:
    losses, norms, digests = alone(more, iterations)
    found = ranks.run(trained, world_size=size, flags=(*more, *flags), iterations=iterations)
    for rank in found:
        assert (rank[0], rank[1]) == (losses, norms)
    assert merge_stages([rank[2] for rank in found]) == digests


@pytest.mark.parametrize(
    "more", [(), DROPOUT, slow(PRECISIONS["bf16"])], ids=["fp8", "dropout", "bf16"]
)
@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (2, degrees(1, 2)),
        (4, degrees(1, 4)),
        (2, degrees(1, 2, *GPIPE)),
        (2, degrees(1, 2, *INTERLEAVED)),
        (2, degrees(1, 2, *ZBV)),
    ],
    ids=["1f1b", "1f1b-pp4", "gpipe", "interleaved", "zbv"],
)
def test_schedules_are_one_rank_bit_for_bit(
    ranks: Ranks, alone: Any, size: int, flags: tuple[str, ...], more: tuple[str, ...]
) -> None:
    check_one_rank(ranks, alone, size, flags, (*BATCH, *more), 5)


@pytest.mark.slow
@pytest.mark.parametrize("case", PIPELINES, ids=lambda case: case.name.replace(" ", ""))
def test_pipelines_are_one_rank_bit_for_bit_over_20_iterations(
    ranks: Ranks, alone: Any, case: LayoutCase
) -> None:
    layers = ("--num-layers", str(case.num_layers))
    check_one_rank(ranks, alone, case.world_size, case.flags, layers, 20)


@pytest.mark.parametrize("more", [slow(()), DROPOUT], ids=["plain", "dropout"])
def test_zero_bubble_equals_1f1b_with_tensor_parallelism(
    ranks: Ranks, more: tuple[str, ...]
) -> None:
    wanted, found = (
        ranks.run(trained, flags=(*BATCH, *more, *degrees(2, 2, SP, *schedule)), iterations=4)
        for schedule in ((), ZBV)
    )
    assert found[0][0] == wanted[0][0]
    assert merge_stages([rank[2] for rank in found]) == merge_stages([r[2] for r in wanted])


# ------------------------------------------------------------------------------------- counts


@contextmanager
def counting(names: tuple[str, ...], counts: Counter[str]) -> Iterator[None]:
    """Count the calls that FP8 linears make into `numerics`."""

    def counted(name: str) -> Any:
        module = operands if name in ("fprop", "dgrad", "wgrad") else casting
        original = getattr(module, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return mock.patch.object(module, name, call)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(counted(name))
        yield


PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")
ATTENTION = ("aten::_scaled_dot_product_flash_attention_for_cpu",)


def work(flags: tuple[str, ...]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """One step's (calls into numerics, matrix products and attention cores, collectives)."""
    training = start_training((*PARITY, *BATCH, *flags))
    training.one_step()
    training.mesh.traffic.drain()
    counts: Counter[str] = Counter()
    with counting(("fprop", "dgrad", "wgrad", "quantize", "compute_amax"), counts):
        curve = training.iterate(1)
    seen: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        training.one_step()
    for event in record.events():
        if event.name in PRODUCTS:
            seen["products"] += 1
        elif event.name.startswith(ATTENTION):
            seen[event.name] += 1
    return counts, seen, Counter(curve.my_calls[0])


@pytest.mark.parametrize(
    "schedule", [slow(()), slow(INTERLEAVED), ZBV], ids=["1f1b", "interleaved", "zbv"]
)
def test_each_product_and_cast_runs_once_per_micro_batch(
    ranks: Ranks, schedule: tuple[str, ...]
) -> None:
    layers = 2  # of 4, on each of two ranks
    once = MICRO_BATCHES * LINEARS * layers
    for counts, _, calls in ranks.run(work, flags=degrees(2, 2, SP, *schedule)):
        assert {name: counts[name] for name in ("fprop", "dgrad", "wgrad")} == {
            "fprop": once,
            "dgrad": once,
            "wgrad": once,
        }
        # Input and output gradient of each micro-batch, and each weight once per step.
        assert counts["quantize"] == 2 * once + LINEARS * layers
        assert counts["compute_amax"] == 2 * once
        # qkv and fc1 gather x for fprop and for wgrad, proj and fc2 gather dY.
        assert calls["tp_linear_all_gather"] == MICRO_BATCHES * layers * 6
        assert calls["tp_linear_reduce_scatter"] == MICRO_BATCHES * layers * 4
        assert calls["amax_all_reduce"] == calls["grad_norm"] == calls["loss"] == 1


def test_schedules_do_the_same_products(ranks: Ranks) -> None:
    """Also those outside the FP8 linears: output layer, attention core."""
    totals = []
    for size, flags in (
        (1, degrees()),
        (2, degrees(1, 2)),
        (2, degrees(1, 2, *INTERLEAVED)),
        (2, degrees(1, 2, *ZBV)),
    ):
        total: Counter[str] = Counter()
        for _, seen, _ in ranks.run(work, world_size=size, flags=flags):
            total += seen
        totals.append(total)
    # Three for each linear and the output layer; a core and its backward for each layer.
    assert totals[0]["products"] == MICRO_BATCHES * 3 * (4 * LINEARS + 1)
    assert sum(totals[0].values()) - totals[0]["products"] == MICRO_BATCHES * 4 * 2
    assert totals[1:] == totals[:1] * 3


def test_recompute_runs_the_forward_again_and_no_more(ranks: Ranks) -> None:
    """The counters above can count: full recompute repeats fprop, the cast and its gather."""
    flags = degrees(2, 2, SP, *RECOMPUTE)
    for counts, _, _ in ranks.run(work, flags=flags):
        once = MICRO_BATCHES * LINEARS * 2
        assert (counts["fprop"], counts["dgrad"], counts["wgrad"]) == (2 * once, once, once)


def test_no_product_is_left_in_the_queue(ranks: Ranks) -> None:
    for left in ranks.run(queued, world_size=2):
        assert left == 0


def queued() -> int:
    training = start_training((*PARITY, *BATCH, *degrees(1, 2, *ZBV)))
    training.one_step()
    deferred = training.model.runner.deferred
    assert deferred is not None and len(deferred) == 2
    return sum(len(queue.queue) for queue in deferred)
