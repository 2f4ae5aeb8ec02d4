"""One division of the loss and of the gradients: by the unmasked tokens of the global batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.train.step import StepResult
from tests.model.small import (
    FP8,
    Run,
    assert_same_bytes,
    kept_gradients,
    one_rank,  # noqa: F401
    small_config,
    start_run,
)

# (loss sum, unmasked tokens) of each micro-batch, by data-parallel rank.
PLANTED = [[(6.0, 3), (10.0, 1)], [(4.0, 4), (0.0, 0)]]


def planted_loss() -> StepResult:
    """A step whose micro-batches have the loss sums and token counts of `PLANTED`."""
    run = start_run(small_config(micro_batch_size=1, global_batch_size=4))
    mine = PLANTED[run.mesh.dp_rank]
    run.model.runner.train = lambda batches, *rest: torch.tensor(sum(loss for loss, _ in mine))
    batches = []
    for _, tokens in mine:
        mask = torch.zeros(1, 16)
        mask[0, :tokens] = 1.0
        batches.append({"loss_mask": mask})
    return run.step.run(batches, 1e-3, 1)


def test_reported_loss_is_the_mean_over_tokens(ranks):
    """2.5: not 3.25 (mean of four means), 4.33 (of three), 20/9 or NaN."""
    answers = ranks.run(planted_loss, world_size=2)
    assert [answer.loss for answer in answers] == [2.5, 2.5]
    assert answers[0].tokens == 8 and not answers[0].skipped


def uneven_masks() -> np.ndarray:
    """Eight samples with 0 to 16 unmasked tokens; any two halves of the batch differ in number."""
    masks = np.zeros((8, 16))
    for row, tokens in enumerate((16, 0, 3, 1, 9, 16, 2, 5)):
        masks[row, np.random.default_rng(row).permutation(16)[:tokens]] = 1
    return masks


def one_step(masks: np.ndarray | None = None, **changes: Any):
    """Result and whole normalised gradients (clipping off) of one step in FP32."""
    run = start_run(small_config(**{"clip_grad": 0.0, **changes}))
    with kept_gradients(run) as gradients:
        result = run.train(range(1), uneven_masks() if masks is None else masks)[0]
    return result, gradients[0] if gradients else {}, global_gradients(run, gradients)


def global_gradients(run: Run, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The kept shards put together as the parameters are."""
    from torch.distributed.tensor import DTensor

    whole = {}
    for name, parameter in run.model.parameters.items() if gradients else ():
        shard = DTensor.from_local(
            gradients[0][name],
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        whole[name] = shard.full_tensor()
    return whole


@pytest.fixture(scope="module")
def single(one_rank: None):  # noqa: F811
    """All eight samples in one micro-batch on one rank."""
    result, _, gradients = one_step(micro_batch_size=8)
    assert result.tokens == 52 and 4.0 < result.loss < 5.2
    return result, gradients


@pytest.mark.parametrize(
    "size, rows, changes",
    [
        (1, 4, {}),
        (1, 2, {}),
        (1, 1, {}),
        (2, 4, {}),
        (2, 2, {}),
        (2, 1, {}),
        (2, 1, {"reshard_after_forward": False}),
        (2, 2, {"fsdp_size": 1}),
        (2, 2, {"pipeline_model_parallel_size": 2}),
    ],
)
def test_no_split_of_the_batch_changes_gradients(ranks, single, size, rows, changes):
    answers = ranks.run(one_step, world_size=size, micro_batch_size=rows, **changes)
    wanted_result, wanted = single
    found: dict[str, Tensor] = {}
    for result, _, gradients in answers:
        assert result.loss == pytest.approx(wanted_result.loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(wanted_result.grad_norm, rel=1e-6)
        assert result.tokens == 52
        found |= gradients
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.norm() > 0
        error = (found[name] - value).norm() / value.norm()
        assert error < 1e-6, (name, float(error))


def all_masked(**changes: Any):
    """State before and after a step in which no token counts, and a normal step after it."""
    run = start_run(small_config(**changes))
    run.train(range(1))
    before = run.state()
    result = run.train(range(1, 2), np.zeros((8, 16)))[0]
    after = run.state()
    return before, after, result, run.step.bad_steps_in_a_row, run.train(range(2, 3))[0]


@pytest.mark.parametrize("precision", [{}, FP8])
def test_a_batch_without_any_token_is_skipped(ranks, precision):
    for before, after, result, bad, following in ranks.run(all_masked, world_size=2, **precision):
        assert result.skipped and result.tokens == 0
        assert (result.loss, result.grad_norm, bad) == (0.0, 0.0, 0)
        assert_same_bytes(after, before)
        assert not following.skipped and 4.0 < following.loss < 5.2


def test_dy_keeps_its_size_whatever_the_batch(ranks):
    """The backward starts from the sum: E5M2 sees the same gradients at any batch size."""
    amaxes = [ranks.run(last_amaxes, world_size=1, global_batch_size=size)[0] for size in (2, 8)]
    # The larger batch holds the smaller one's samples; the maximum grows by chance alone.
    assert all(1.0 <= large / small < 4.0 for small, large in zip(*amaxes, strict=True))


def last_amaxes(global_batch_size: int) -> list[float]:
    run = start_run(small_config(**FP8, global_batch_size=global_batch_size))
    run.train(range(1))
    registry = run.model.registry
    assert registry is not None
    rows = [i for i, (_, role) in enumerate(registry.keys) if role == "grad_output"]
    return registry.amax_history[-1, rows].tolist()
