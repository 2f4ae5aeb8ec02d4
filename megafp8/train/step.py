"""One training iteration: micro-batches, gradients, optimizer, then one scale update."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.config import RunConfig
from megafp8.errors import TrainingError
from megafp8.log import get_logger
from megafp8.model import Model
from megafp8.parallel.mesh import Mesh
from megafp8.train.gradients import Gradients
from megafp8.train.loss_scaler import LossScaler
from megafp8.train.optimizer import build_optimizer, take_step
from megafp8.train.parts import NamedPart, StatePart
from megafp8.train.scales import ScaleCycle

log = get_logger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one iteration did.

    Attributes:
        loss: mean token loss of the global batch in nats.
        grad_norm: global 2-norm before clipping, of the mean loss.
        tokens: tokens of the global batch that count in the loss.
        skipped: whether the optimizer step was left out.
        zeros_in_grad: exact zeros among the gradients, if the run logs them.
        reason: why the step was left out, in words; the same on all ranks.
        extra_losses: means over the same tokens of losses beside the main one, where stages return
            any.
    """

    loss: float
    grad_norm: float
    tokens: float
    skipped: bool
    zeros_in_grad: int | None = None
    reason: str = ""
    extra_losses: dict[str, float] | None = None


class TrainingStep:
    """Runs iterations on a model; owns the optimizer and `parts`, the run's state beside it.

    The loss of a micro-batch is the *sum* over its tokens. Gradients are multiplied once, after all
    reductions, by 1 / (tokens of the global batch), so no split of the batch changes the weighting.
    """

    def __init__(
        self, config: RunConfig, model: Model, mesh: Mesh, loss_scaler: LossScaler
    ) -> None:
        self.config, self.model, self.mesh = config, model, mesh
        self.loss_scaler = loss_scaler
        self.gradients = Gradients(model, mesh)
        self.optimizer = build_optimizer(config.optimizer, self.gradients.named_shards())
        self.bad_steps_in_a_row = 0
        self._last_fault = ""  # what the newest bad step's gradients were not finite in
        masters = {entry.name: entry.shard for entry in self.gradients.entries}
        self.scales = ScaleCycle(model.registry, config.precision, mesh, masters)
        self.parts: list[StatePart] = []
        self.register(NamedPart("loss_scaler", loss_scaler))
        self.register(self.scales)

    def register(self, part: StatePart) -> None:
        """Have one more part of the state saved and resumed; before a checkpoint is loaded."""
        assert part.name not in {other.name for other in self.parts}, part.name
        self.parts.append(part)

    def run(
        self, micro_batches: list[dict[str, Tensor]], learning_rate: float, iteration: int
    ) -> StepResult:
        """Train on one global batch; a collective call on all ranks.

        Args:
            micro_batches: this data-parallel rank's part.
            learning_rate: for this iteration.
            iteration: 1-based, for messages.
        """
        scale = self.loss_scaler.scale
        self.scales.begin()
        local_loss = self.model.runner.train(
            micro_batches, scale, self.scales.between_micro_batches
        )
        totals = self._totals(local_loss, micro_batches)
        self.gradients.collect()
        norm = self.gradients.norm(self._hidden_fault(local_loss))
        # The one wait for the device: everything above is in its queue by now.
        loss_sum, tokens, *extra_sums, raw_norm = torch.cat((totals, norm.reshape(1))).tolist()
        divisor = tokens * scale if tokens else 1.0
        grad_norm = raw_norm / divisor
        zeros = self.gradients.zeros() if self.config.logging.log_num_zeros_in_grad else None
        # The norm alone decides: it is one number on all ranks, so that all take one way.
        finite = math.isfinite(raw_norm)
        skipped = not finite or tokens == 0
        reason = ""
        if skipped:
            reason = self._report_skip(iteration, tokens)
            for reduction in self.model.fp8_reductions:
                reduction.forget()
        else:
            clip = self.config.optimizer.clip_grad
            clipped = min(1.0, clip / (grad_norm + 1e-6)) if clip > 0 else 1.0
            self.gradients.scale(clipped / divisor)
        take_step(self.optimizer, learning_rate, skip=skipped)
        self.scales.end(skipped)
        overflow = not finite and math.isfinite(loss_sum) and self.loss_scaler.can_back_off
        self.loss_scaler.update(not finite)
        # One that lowers the loss scale is how the scale is found, not a fault.
        self.bad_steps_in_a_row = 0 if finite or overflow else self.bad_steps_in_a_row + 1
        loss, *extras = (total / tokens if tokens else 0.0 for total in (loss_sum, *extra_sums))
        names = self.model.runner.extra_losses
        extra_losses = dict(zip(names, extras, strict=True)) or None
        return StepResult(loss, grad_norm, tokens, skipped, zeros, reason, extra_losses)

    def _totals(self, local_loss: Tensor, micro_batches: list[dict[str, Tensor]]) -> Tensor:
        """Fp64 [2 + n]: sums of the global batch: loss, counted tokens and further losses."""
        extras = list(self.model.runner.extra_totals.values())
        totals = torch.zeros(2 + len(extras), dtype=torch.float64, device=self.mesh.world.device)
        if self.model.runner.has_last:
            totals[0] = local_loss
            totals[1] = sum(batch["loss_mask"].sum(dtype=torch.float64) for batch in micro_batches)
        if extras:
            totals[2:] = torch.stack(extras)
        self.mesh.loss.all_reduce(totals, "loss")
        return totals

    def _hidden_fault(self, local_loss: Tensor) -> Tensor:
        """Inf if this rank saw a fault that its gradients may not show, else 0.

        Losses that are not finite, and what `ScaleCycle.fault` sees in tensors cast to FP8.
        """
        losses = torch.stack([local_loss, *self.model.runner.extra_totals.values()])
        fault = ~losses.isfinite().all() | self.scales.fault()
        return torch.where(fault, torch.inf, 0.0)

    def _report_skip(self, iteration: int, tokens: float) -> str:
        """Name the parameters and ranks at fault. Rare, so object collectives are fine."""
        if tokens == 0:
            reason = "no token counts in the loss"
            log.warning("iteration %d: %s; step skipped", iteration, reason)
            return reason
        names = self.gradients.nonfinite_names() or self.scales.bad_names()
        everyone: list[list[str]] = [[] for _ in range(self.mesh.world.size)]
        dist.all_gather_object(everyone, names)
        found = [f"{names[0]} on rank {rank}" for rank, names in enumerate(everyone) if names]
        self._last_fault = ", ".join(found[:4]) or "the loss alone"
        count = sum(len(names) for names in everyone)
        reason = f"gradient not finite in {self._last_fault} ({count} tensors over all ranks)"
        log.warning("iteration %d: %s; step skipped on all ranks", iteration, reason)
        return reason

    @property
    def stuck(self) -> bool:
        """Whether too many steps in a row were bad for the run to go on; the same on all ranks."""
        training = self.config.training
        limit = training.max_consecutive_bad_steps
        return training.check_for_nan_in_loss_and_grad and self.bad_steps_in_a_row >= limit

    def check_not_stuck(self, iteration: int) -> None:
        """Stop after too many bad steps in a row.

        Raises:
            TrainingError: on all ranks, after `max_consecutive_bad_steps` of them.
        """
        if self.stuck:
            raise TrainingError(
                f"iteration {iteration}: {self.bad_steps_in_a_row} steps in a row had non-finite "
                f"gradients, this one in {self._last_fault}; the run stops and the last checkpoint "
                "stays as it is (--max-consecutive-bad-steps)"
            )
