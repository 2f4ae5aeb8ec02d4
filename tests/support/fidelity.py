"""How near a run's FP8 weight gradients are to BF16's, from the same weights and samples.

`measure` is called on ranks, as what `layouts.py` offers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.config.shape import ModelShape
from megafp8.convert.routes import split_qkv
from megafp8.layers.native.casting import DelayedCasts, TensorwiseCasts
from megafp8.layers.native.granular import GranularOperands
from megafp8.layers.parameters import local
from megafp8.numerics import ScaleRegistry
from megafp8.numerics.statistics import closeness, count, summarize
from tests.support.layouts import Training, start_training

Counts = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Fidelity:
    """One run.

    Attributes:
        sqnr_db: of weight gradients against BF16's, mean over the measured iterations, by linear;
            a fused one counts by its parts (q, k and v; gate and up).
        cosine: the same.
        underflow: of casts in the measured iterations, in percent, by (linear, role).
        losses: of all iterations.
    """

    sqnr_db: dict[str, float]
    cosine: dict[str, float]
    underflow: dict[tuple[str, str], float]
    losses: list[float]

    def worst(self) -> dict[str, float]:
        """Return the least SQNR and cosine and the largest underflow."""
        return {
            "sqnr_db": min(self.sqnr_db.values()),
            "cosine": min(self.cosine.values()),
            "underflow": max(self.underflow.values()),
        }


def another_roles_scale(registry: ScaleRegistry) -> None:
    """Plant a defect: casts take, and are decoded by, the scale of another role of their linear."""
    other = {"input": "weight", "weight": "grad_output", "grad_output": "input"}
    swapped = [registry.index_of(module, other[role]) for module, role in registry.keys]  # type: ignore[arg-type]
    scale_of, scale_inv_of = registry.scale_of, registry.scale_inv_of
    registry.scale_of = lambda index: scale_of(swapped[index])  # type: ignore[method-assign]
    registry.scale_inv_of = lambda index: scale_inv_of(swapped[index])  # type: ignore[method-assign]


def stale_scale_inv(registry: ScaleRegistry) -> None:
    """Plant a defect: codes are decoded with the scale_inv of the step before."""
    before, update = registry.scale_inv.clone(), registry.update
    views = before.unbind()

    def remember_and_update(*arguments: Any) -> None:
        before.copy_(registry.scale_inv)
        update(*arguments)

    registry.update = remember_and_update  # type: ignore[method-assign]
    registry.scale_inv_of = lambda index: views[index]  # type: ignore[method-assign]


def measure(
    flags: Sequence[str],
    fp8_flags: Sequence[str],
    iterations: int,
    measured: Sequence[int],
    defect: Callable[[ScaleRegistry], None] | None = None,
) -> Fidelity:
    """Train in FP8; in some iterations run the same batch from the same weights in BF16 too.

    The reference has the layout of the run and nothing of FP8, on no wire either. Collective.

    Args:
        flags: command line of `pretrain_gpt.py`, of both.
        fp8_flags: more of the run's, in place of the reference's `--fp8-format none`.
        iterations: of the run.
        measured: 1-based iterations in which gradients are compared; after some others, so that
            delayed scales have been chosen from windows.
        defect: changes the registry before the first iteration.
    """
    run = start_training((*flags, *fp8_flags))
    reference = start_training((*flags, "--fp8-format", "none"))
    assert {linear.precision for linear in run.plan.linears} == {"fp8"}
    registry = run.model.registry
    assert registry is not None
    if defect is not None:
        defect(registry)
    found: dict[str, list[tuple[float, float]]] = {}
    counts: Counts = {key: torch.zeros(9, dtype=torch.float64) for key in registry.keys}
    losses = []
    for iteration in range(1, iterations + 1):
        if iteration not in measured:
            losses.append(run.one_step().loss)
            continue
        wanted = _gradients_in_bf16(reference, run)
        with _counted(counts):
            result, gradients = run.step_with_gradients()
        losses.append(result.loss)
        for linear in run.plan.linears:
            name = f"{linear.name}.weight"
            for part, (mine, theirs) in _parts(name, gradients, wanted, run.shape).items():
                sqnr_db, cosine = closeness(mine, theirs)
                assert sqnr_db is not None, f"{part}: BF16's gradient is 0"
                found.setdefault(part, []).append((sqnr_db, cosine or 0.0))
    sqnr_db, cosine = (
        {part: sum(pair[which] for pair in pairs) / len(pairs) for part, pairs in found.items()}
        for which in (0, 1)
    )
    return Fidelity(sqnr_db, cosine, _underflow(counts), losses)


@torch.no_grad()
def _gradients_in_bf16(reference: Training, run: Training) -> dict[str, Tensor]:
    """Gradients of the reference with the run's weights and its next batch."""
    for name, parameter in reference.model.parameters.items():
        local(parameter).copy_(local(run.model.parameters[name]))
    reference.state.iteration = run.state.iteration
    reference.state.consumed_samples = run.state.consumed_samples
    with torch.enable_grad():
        return reference.step_with_gradients()[1]


def _parts(
    name: str, found: dict[str, Tensor], wanted: dict[str, Tensor], shape: ModelShape
) -> dict[str, tuple[Tensor, Tensor]]:
    """A linear's gradients in both runs; by part where it is fused.

    In a common norm those of q and k, which can be 100 times smaller than v's, would not count.
    """
    pair, module = (found[name], wanted[name]), name.removesuffix(".weight")
    if module.endswith("linear_qkv"):
        split = [split_qkv(gradient, shape) for gradient in pair]
        labels: tuple[str, ...] = ("q", "k", "v")
    elif pair[0].dim() == 3:  # [2, ffn, h]
        split = [list(gradient.unbind()) for gradient in pair]
        labels = ("gate", "up")
    else:
        return {module: pair}
    return {
        f"{module} ({label})": (mine, theirs)
        for label, mine, theirs in zip(labels, *split, strict=True)
    }


@contextmanager
def _counted(counts: Counts) -> Iterator[None]:
    """Add up the statistics of every cast of a linear's operand."""

    def counting(cast: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any, role: str, x: Tensor, *more: Any, **options: Any) -> Any:
            made = cast(self, role, x, *more, **options)
            for one in made if isinstance(made, list) else [made]:
                counts[self.registry.keys[self.index[role]]] += count(x, one)
            return made

        return counted

    with (
        mock.patch.object(DelayedCasts, "__call__", counting(DelayedCasts.__call__)),
        mock.patch.object(TensorwiseCasts, "__call__", counting(TensorwiseCasts.__call__)),
        mock.patch.object(GranularOperands, "_casts", counting(GranularOperands._casts)),
    ):
        yield


def _underflow(counts: Counts) -> dict[tuple[str, str], float]:
    """Percent over all ranks; of weights that FSDP gathers as codes nothing is known."""
    total = torch.stack(list(counts.values()))
    dist.all_reduce(total)
    shares = [summarize(row)["underflow"] for row in total]
    pairs = zip(counts, shares, strict=True)
    return {key: share for key, share in pairs if share is not None}
