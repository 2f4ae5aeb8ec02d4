"""Parts of the pipeline: boundary dtypes, deferred work, forward-only passes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.errors import TrainingError
from megafp8.parallel import Traffic
from megafp8.parallel.pipeline import DeferredWeightGradients, _CountedStage
from megafp8.parallel.traffic import summarize
from tests.model.small import micro_batches, small_config, start_run


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
    with pytest.raises(TrainingError, match=f"stage 3: boundary tensor is torch.{name}"):
        boundary_stage()._check(sends(torch.bfloat16, dtype))


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
