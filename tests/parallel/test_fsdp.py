"""How often FSDP2 gathers and reduces in a step, by what is kept gathered."""

from typing import Any

import pytest
import torch

from megafp8.parallel.traffic import summarize
from tests.model.small import small_config, start_run

# Groups: two blocks; embedding, output layer and the root with the final norm are "other".
BLOCKS, OTHERS = 2, 3


def calls_of_a_step(micro_batches: int, **changes: Any) -> dict[str, int]:
    """Calls by kind of the second step, for data-parallel kinds."""
    size = torch.distributed.get_world_size()
    run = start_run(small_config(**changes, global_batch_size=2 * size * micro_batches))
    run.train(range(1))
    run.mesh.traffic.drain()
    run.train(range(1, 2))
    calls = summarize(torch.tensor([run.mesh.traffic.drain()]))[1]
    return {kind: n for kind, n in calls.items() if kind.startswith(("fsdp", "dp"))}


@pytest.mark.parametrize("count", [1, 3])
def test_kept_parameters_are_gathered_and_reduced_once_a_step(ranks, count):
    (calls, _) = ranks.run(
        calls_of_a_step, world_size=2, micro_batches=count, reshard_after_forward=False
    )
    assert calls == {
        "fsdp_block_all_gather": BLOCKS,
        "fsdp_block_reduce_scatter": BLOCKS,
        "fsdp_other_all_gather": OTHERS,
        "fsdp_other_reduce_scatter": OTHERS,
    }


@pytest.mark.parametrize("count", [1, 3])
def test_freed_parameters_are_gathered_and_reduced_with_each_micro_batch(ranks, count):
    (calls, _) = ranks.run(
        calls_of_a_step, world_size=2, micro_batches=count, reshard_after_forward=True
    )
    assert calls["fsdp_block_all_gather"] == 2 * BLOCKS * count, "forward and backward"
    assert calls["fsdp_block_reduce_scatter"] == BLOCKS * count
    assert calls["fsdp_other_reduce_scatter"] == OTHERS * count


def test_replicas_add_their_gradients_once_a_step(ranks):
    """Two replicas of two shards; whether parameters are kept does not matter."""
    for reshard in (False, True):
        answers = ranks.run(
            calls_of_a_step, micro_batches=2, fsdp_size=2, reshard_after_forward=reshard
        )
        assert answers[0]["dp_all_reduce"] == BLOCKS + OTHERS
