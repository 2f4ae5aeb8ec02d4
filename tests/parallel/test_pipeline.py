"""Stages and schedules: boundary dtypes are enforced, deferred work runs once and in its slot."""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import megafp8.layers.native.operands as operands
from megafp8.parallel import CommGroup, Traffic
from megafp8.parallel.pipeline import DeferredWeightGradients, _CountedStage
from megafp8.parallel.traffic import summarize
from tests.model.small import FP8, micro_batches, small_config, start_run

MICRO_BATCHES = 4


def test_deferred_work_belongs_to_one_backward():
    queue, done = DeferredWeightGradients(), []
    queue.queue.append(lambda: done.append("first"))
    queue.queue.append(lambda: done.append("second"))
    work = queue.take()
    queue.queue.append(lambda: done.append("of the next backward"))
    assert done == []
    work()
    assert done == ["first", "second"]
    work()
    assert done == ["first", "second"], "each runs once"
    queue.take()()
    assert done == ["first", "second", "of the next backward"]


def work_of_a_step(schedule: str) -> Counter[str]:
    """How often each GEMM, cast, gather and reduction of the linears runs in one step."""
    run = start_run(
        small_config(
            **FP8,
            num_layers=4,
            pipeline_model_parallel_size=2,
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            pipeline_schedule=schedule,
        )
    )
    counts: Counter[str] = Counter()

    def counting(name: str) -> Any:
        original = getattr(operands, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return mock.patch.object(operands, name, call)

    gather = CommGroup.all_gather

    def counted_gather(self: CommGroup, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        counts[kind] += kind == "tp_linear_all_gather"
        return gather(self, tensor, kind)

    with (
        counting("fprop"),
        counting("dgrad"),
        counting("wgrad"),
        counting("quantize"),
        mock.patch.object(CommGroup, "all_gather", counted_gather),
    ):
        run.train(range(1))
    return counts


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_each_product_cast_and_gather_runs_once(ranks, schedule):
    """Zero bubble defers weight gradients; nothing may be computed a second time for it."""
    uses = MICRO_BATCHES * 2 * 4  # two layers of four linears on each rank
    for counts in ranks.run(work_of_a_step, schedule=schedule):
        assert (counts["fprop"], counts["dgrad"], counts["wgrad"]) == (uses, uses, uses)
        assert counts["quantize"] == 2 * uses + 8, "input and gradient each time, weights once"
        # Column-parallel: the input twice; row-parallel: the gradient once. Half of each.
        assert counts["tp_linear_all_gather"] == 3 * uses // 2


def boundary_stage() -> _CountedStage:
    """A stage as far as its checks of what it sends go."""
    stage = object.__new__(_CountedStage)
    stage.stage_index, stage.boundary_dtype = 3, torch.bfloat16
    stage.mesh = SimpleNamespace(traffic=Traffic())  # type: ignore[assignment]
    return stage


def sends(*dtypes: torch.dtype) -> list[Any]:
    return [SimpleNamespace(tensor=torch.zeros(4, 2, dtype=dtype)) for dtype in dtypes]


def test_what_a_stage_sends_is_counted():
    stage, ops = boundary_stage(), sends(torch.bfloat16, torch.bfloat16)
    assert stage._check(ops) is ops
    counted = summarize(torch.tensor([stage.mesh.traffic.drain()]))
    assert counted == ({"pp_p2p": {"bfloat16": 32}}, {"pp_p2p": 2})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_boundaries_of_another_dtype_are_refused(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(AssertionError, match=f"stage 3: boundary tensor is torch.{name}"):
        boundary_stage()._check(sends(torch.bfloat16, dtype))


def dtypes_sent(**changes: Any) -> set[str]:
    """Dtypes of everything that a training step sends over the boundary."""
    run = start_run(small_config(pipeline_model_parallel_size=2, **changes))
    run.mesh.traffic.drain()
    run.train(range(1))
    return set(summarize(torch.tensor([run.mesh.traffic.drain()]))[0]["pp_p2p"])


@pytest.mark.parametrize(
    "precision, dtype",
    [({}, "float32"), ({"bf16": True}, "bfloat16"), ({"fp16": True}, "float16"), (FP8, "bfloat16")],
)
def test_boundaries_are_of_the_compute_dtype(ranks, precision, dtype):
    """Rank 0 sends activations, rank 1 gradients."""
    assert ranks.run(dtypes_sent, world_size=2, **precision) == [{dtype}] * 2


def evaluated(schedule: str, **changes: Any) -> float:
    """Validation through the chunks of a schedule: forward only, no schedule of torch's."""
    run = start_run(small_config(num_layers=4, pipeline_schedule=schedule, **changes))
    total = run.model.runner.evaluate(micro_batches(run, 0)).reshape(1).clone()
    if run.mesh.layout.pp > 1:
        torch.distributed.all_reduce(total)
    return float(total)


@pytest.mark.parametrize(
    "schedule, changes",
    [
        ("1f1b", {}),
        ("interleaved", {"num_layers_per_virtual_pipeline_stage": 1}),
        ("zbv", {}),
    ],
)
def test_evaluation_equals_one_stage(ranks, schedule, changes):
    (alone,) = ranks.run(evaluated, world_size=1, schedule="1f1b")
    answers = ranks.run(
        evaluated, world_size=2, schedule=schedule, pipeline_model_parallel_size=2, **changes
    )
    assert answers == pytest.approx([alone, alone], rel=1e-6)
