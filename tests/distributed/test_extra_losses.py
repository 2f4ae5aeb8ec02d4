"""Stages may return losses beside the main one: trained with it and reported, at any layout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.train.step import StepResult
from tests.model.small import Run, small_config, start_run
from tests.support.ranks import Ranks

FACTORS = {"embedded": 10.0, "normed": 0.01}  # of about the same size, and of the main loss's
PP2 = {"pipeline_model_parallel_size": 2}
Output = Tensor | tuple[Tensor, dict[str, Tensor]]


def return_losses(run: Run, finish: Callable[[Tensor, dict[str, Tensor]], Output]) -> None:
    """Let each stage return the squares of its embeddings and of its last norm, if it has them."""
    for stage in run.model.stages:
        losses: dict[str, Tensor] = {}

        def note(name: str, losses: dict[str, Tensor] = losses) -> Callable[..., None]:
            def hook(module: Any, args: Any, output: Tensor) -> None:
                losses[name] = FACTORS[name] * output.float().square().sum()

            return hook

        if stage.embedding is not None:
            stage.embedding.register_forward_hook(note("embedded"))
        if stage.decoder.final_layernorm is not None:
            stage.decoder.final_layernorm.register_forward_hook(note("normed"))

        def forward(
            *args: Any, before: Any = stage.forward, own: Any = losses, **batch: Any
        ) -> Output:
            return finish(before(*args, **batch), own)

        stage.forward = forward  # type: ignore[method-assign]


def beside(**changes: Any) -> list[StepResult]:
    """Three steps whose stages return the losses beside the main one."""
    run = start_run(small_config(num_layers=4, **changes))
    run.model.runner.extra_losses = tuple(FACTORS)
    return_losses(run, lambda main, losses: (main, dict(losses)))
    return run.train(range(3))


def inside(**changes: Any) -> list[StepResult]:
    """The same with one stage, whose main loss is the sum of all."""
    run = start_run(small_config(num_layers=4, **changes))
    return_losses(run, lambda main, losses: main + torch.stack([*losses.values()]).sum())
    return run.train(range(3))


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, {}),
        (2, PP2),
        (2, {**PP2, "pipeline_schedule": "zbv"}),
        (1, {"bf16": None, "fp16": True, "loss_scale": 64.0}),
    ],
    ids=["one", "pp2", "zbv", "loss scale"],
)
def test_they_are_trained_and_reported(ranks: Ranks, size: int, layout: dict[str, Any]) -> None:
    (wanted,) = ranks.run(inside, world_size=1)
    apart = ranks.run(beside, world_size=size, **layout)
    assert all(results == apart[0] for results in apart), "the same on all ranks"
    bound = 1e-2 if "fp16" in layout else 1e-5
    for result, whole in zip(apart[0], wanted, strict=True):
        extra = result.extra_losses
        assert extra is not None and list(extra) == list(FACTORS)
        assert min(extra.values()) > 1e-2
        assert result.loss + sum(extra.values()) == pytest.approx(whole.loss, rel=bound)
        assert result.grad_norm == pytest.approx(whole.grad_norm, rel=bound)
        assert whole.extra_losses is None
