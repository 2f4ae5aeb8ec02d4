"""Faults that one rank alone sees: every rank skips, none keeps a NaN, none waits for ever."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel import World, build_mesh
from megafp8.parallel.pipeline import PipelineRunner
from tests.model.small import FP8, GPT2, LLAMA, small_config, start_run

TP2 = {"tensor_model_parallel_size": 2}


def fault_on_rank_1(monkeypatch: pytest.MonkeyPatch, victim: str | None) -> None:
    """Rank 1 gets a NaN in a gradient after the backward, or in its loss (victim None)."""
    original = PipelineRunner.train

    def train(self: PipelineRunner, batches, *rest):
        total = original(self, batches, *rest)
        if dist.get_rank() == 1:
            if victim is None:
                return total * float("nan")
            parameters = {n: p for stage in self.modules for n, p in stage.named_parameters()}
            parameters[victim].grad.to_local().view(-1)[0] = float("nan")
        return total

    monkeypatch.setattr(PipelineRunner, "train", train)


def skip_on_rank_1(victim: str | None, changes: dict, style=LLAMA) -> tuple[bool, bool, bool]:
    """(skipped, state unchanged by the skipped step, next step taken)."""
    run = start_run(small_config(style, **changes))
    run.train(range(1))
    before = run.state()
    patch = pytest.MonkeyPatch()
    fault_on_rank_1(patch, victim)
    try:
        (bad,) = run.train(range(1, 2))
    finally:
        patch.undo()
    after = run.state()
    same = all(torch.equal(before[name], after[name]) for name in before)
    (good,) = run.train(range(2, 3))
    return bad.skipped, same, not good.skipped


@pytest.mark.parametrize(
    "victim, changes",
    [
        ("decoder.layers.0.input_layernorm.weight", TP2),  # replicated: rank 1's copy alone
        ("decoder.layers.0.input_layernorm.weight", {**TP2, **FP8}),
        (None, TP2),  # a loss that is NaN on one tensor-parallel rank
        (None, {"fsdp_size": 1}),
        ("decoder.final_layernorm.weight", {"fsdp_size": 1}),  # on the second replica alone
    ],
)
def test_a_fault_that_one_rank_sees_is_a_skip_on_all(ranks, victim, changes) -> None:
    results = ranks.run(skip_on_rank_1, world_size=2, victim=victim, changes=changes)
    assert results == [(True, True, True)] * 2


def test_a_fault_in_the_copy_of_a_tied_embedding(ranks) -> None:
    changes = {"pipeline_model_parallel_size": 2}
    results = ranks.run(
        skip_on_rank_1,
        world_size=2,
        victim="output_layer.weight",
        changes=changes,
        style=GPT2,
    )
    assert results == [(True, True, True)] * 2


def group_timeouts(changes: dict) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    limit = timedelta(seconds=17)
    world = World(rank, size, rank, torch.device("cpu"), "gloo", limit)
    mesh = build_mesh(small_config(**changes).layout(size), world)
    groups = (mesh.tp, mesh.pp, mesh.stage, mesh.loss, mesh.tied)
    found = [group.process_group for group in groups if group.process_group is not None]
    found += [mesh.tp_mesh.get_group(), mesh.fsdp_mesh.get_group()]
    backends = [group._get_backend(torch.device("cpu")) for group in found]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_every_group_has_the_timeout_of_the_run(ranks) -> None:
    changes = {**TP2, "pipeline_model_parallel_size": 2}
    for timeouts in ranks.run(group_timeouts, world_size=4, changes=changes):
        # The world's own group was opened by the test harness.
        assert set(timeouts) == {17.0}
