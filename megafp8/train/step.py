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
from megafp8.numerics import ScaleRegistry, compute_amax
from megafp8.parallel.mesh import Mesh
from megafp8.train.gradients import Gradients
from megafp8.train.loss_scaler import LossScaler
from megafp8.train.optimizer import build_optimizer, take_step

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
    """

    loss: float
    grad_norm: float
    tokens: float
    skipped: bool
    zeros_in_grad: int | None = None
    reason: str = ""


class TrainingStep:
    """Runs iterations on a model; owns the optimizer.

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
        self._bad_before: Tensor | None = None
        self._bad_weights: Tensor | None = None
        gathered = config.precision.fp8 and config.precision.fp8_param_gather
        self._fp8_weights = _fp8_weight_shards(model.registry, self.gradients, gathered)
        self._fp8_weight_indices = torch.tensor(
            [index for index, _ in self._fp8_weights], dtype=torch.int64, device=mesh.world.device
        )
        self.refresh_weight_scales()

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
        before = self._scales_before()
        local_loss = self.model.runner.train(micro_batches, scale, self._between_micro_batches)
        totals = self._totals(local_loss, micro_batches)
        self.gradients.collect()
        norm = self.gradients.norm(self._hidden_fault(local_loss))
        # The one wait for the device: everything above is in its queue by now.
        loss_sum, tokens, raw_norm = torch.cat((totals, norm.reshape(1))).tolist()
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
        self._update_scales(skipped, before)
        overflow = not finite and math.isfinite(loss_sum) and self.loss_scaler.can_back_off
        self.loss_scaler.update(not finite)
        # One that lowers the loss scale is how the scale is found, not a fault.
        self.bad_steps_in_a_row = 0 if finite or overflow else self.bad_steps_in_a_row + 1
        loss = loss_sum / tokens if tokens else 0.0
        return StepResult(loss, grad_norm, tokens, skipped, zeros, reason)

    def _totals(self, local_loss: Tensor, micro_batches: list[dict[str, Tensor]]) -> Tensor:
        """Fp64 [2]: loss sum and counted tokens of the global batch, from the last stages."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.mesh.world.device)
        if self.model.runner.has_last:
            totals[0] = local_loss
            totals[1] = sum(batch["loss_mask"].sum(dtype=torch.float64) for batch in micro_batches)
        self.mesh.loss.all_reduce(totals, "loss")
        return totals

    def _hidden_fault(self, local_loss: Tensor) -> Tensor:
        """Inf if this rank saw a fault that its gradients may not show, else 0.

        A loss that is not finite; and an inf or NaN in a tensor that was cast to FP8, since the
        cast turns inf into the largest FP8 number. With `nonfinite_amax="freeze"`, which is
        TransformerEngine's way, such a step is taken.
        """
        fault = ~local_loss.isfinite()
        registry = self.model.registry
        if registry is not None and registry.recipe.nonfinite_amax == "skip":
            fault = fault | self._bad_casts(registry).any()
        return torch.where(fault, torch.inf, 0.0)

    def _bad_casts(self, registry: ScaleRegistry) -> Tensor:
        """Bool [N]: this rank's FP8 tensors that held an inf or NaN in this step."""
        bad = ~registry.pending_amax.isfinite()
        for seen in (self._bad_before, self._bad_weights):
            if seen is not None:
                bad |= seen
        return bad

    def _scales_before(self) -> tuple[Tensor, Tensor] | None:
        """Copies of scales and windows, where they move before the step is known to be good."""
        registry, self._bad_before = self.model.registry, None
        if registry is None or self.config.precision.fp8_amax_window == "step":
            return None
        return registry.scale.clone(), registry.amax_history.clone()

    def _between_micro_batches(self) -> None:
        """With one window entry per micro-batch, scales move after each; see `_update_scales`.

        The last micro-batch's entry is made at the end of the step, with that of the weights.
        """
        registry = self.model.registry
        if registry is None or self.config.precision.fp8_amax_window == "step":
            return
        self._bad_before = self._bad_casts(registry)
        registry.update(self._reduce_amax)

    def _update_scales(self, skipped: bool, before: tuple[Tensor, Tensor] | None) -> None:
        """The update of all FP8 scales: one MAX all-reduce of one flat vector.

        One per step, or one per micro-batch. A skipped step changes no scale: those that moved
        within it (`before`) are put back.
        """
        registry = self.model.registry
        if registry is None:
            return
        if skipped:
            registry.drop_pending()
            if before is not None:
                registry.restore(*before)
            return
        if not registry.recipe.stateful:
            registry.update()
            self.refresh_weight_scales()
            return
        if self._fp8_weights:
            registry.pending_amax[self._fp8_weight_indices] = self._weight_amaxes(registry)
        registry.update(self._reduce_amax)

    def _weight_amaxes(self, registry: ScaleRegistry) -> Tensor:
        """Fp32 [n]: largest |master| of this rank's FP8 weight shards.

        A cast would turn an inf that an update has left there into the largest FP8 number, and
        nothing of the next step would show it: the weights that hold one are remembered.
        """
        drop_nan = registry.recipe.drops_nan
        amax = torch.stack([compute_amax(shard, drop_nan) for _, shard in self._fp8_weights])
        self._bad_weights = torch.zeros(len(registry), dtype=torch.bool, device=amax.device)
        self._bad_weights[self._fp8_weight_indices] = ~amax.isfinite()
        return amax

    @torch.no_grad()
    def refresh_weight_scales(self) -> None:
        """Look at FP8 weights as they are now: at the start, after a load, after a step.

        A collective call of the stage's ranks. With delayed scaling weights without a history get
        the scale of their masters, the first time they are cast. Without state those that FSDP
        gathers in FP8 get their current scales.
        """
        registry = self.model.registry
        if registry is None or not self._fp8_weights:
            return
        amax = self._weight_amaxes(registry)
        amax = torch.nan_to_num(amax, nan=torch.inf, posinf=torch.inf)  # MAX may lose NaN
        registry.take_current(self._fp8_weight_indices, self._reduce_weight_amax(amax))

    def _reduce_amax(self, amax: Tensor) -> None:
        """Maximum over the ranks that share scales; without sharing, only what has to agree."""
        if self.config.precision.fp8_reduce_amax:
            self.mesh.stage.all_reduce(amax, "amax_all_reduce", dist.ReduceOp.MAX)
            return
        weights = self._fp8_weight_indices
        if len(weights):
            amax[weights] = self._reduce_weight_amax(amax[weights])

    def _reduce_weight_amax(self, amax: Tensor) -> Tensor:
        """Maximum of weights' amaxes [n] over the ranks that share their scales.

        A weight is one tensor for all data-parallel ranks, of which each holds a shard: its scale
        has to cover the whole in any case. So with `--no-fp8-reduce-amax` weights still agree over
        data parallel, and ranks of a tensor-parallel group, which hold different parts, do not.
        """
        if self.config.precision.fp8_reduce_amax:
            self.mesh.stage.all_reduce(amax, "amax_all_reduce", dist.ReduceOp.MAX)
            return amax
        # A row for each tp rank: one reduction over the stage's group, which is there already.
        rows = amax.new_zeros(self.mesh.layout.tp, len(amax))
        rows[self.mesh.tp_rank] = amax
        self.mesh.stage.all_reduce(rows, "amax_all_reduce", dist.ReduceOp.MAX)
        return rows[self.mesh.tp_rank]

    def _report_skip(self, iteration: int, tokens: float) -> str:
        """Name the parameters and ranks at fault. Rare, so object collectives are fine."""
        if tokens == 0:
            reason = "no token counts in the loss"
            log.warning("iteration %d: %s; step skipped", iteration, reason)
            return reason
        names = self.gradients.nonfinite_names() or self._nonfinite_casts()
        everyone: list[list[str]] = [[] for _ in range(self.mesh.world.size)]
        dist.all_gather_object(everyone, names)
        found = [f"{names[0]} on rank {rank}" for rank, names in enumerate(everyone) if names]
        self._last_fault = ", ".join(found[:4]) or "the loss alone"
        count = sum(len(names) for names in everyone)
        reason = f"gradient not finite in {self._last_fault} ({count} tensors over all ranks)"
        log.warning("iteration %d: %s; step skipped on all ranks", iteration, reason)
        return reason

    def _nonfinite_casts(self) -> list[str]:
        """This rank's FP8 tensors that held an inf or NaN in this step."""
        registry = self.model.registry
        if registry is None:
            return []
        bad = self._bad_casts(registry).nonzero().flatten().tolist()
        return [f"{registry.keys[index][0]} (FP8 {registry.keys[index][1]})" for index in bad]

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


def _fp8_weight_shards(
    registry: ScaleRegistry | None, gradients: Gradients, gathered: bool
) -> list[tuple[int, Tensor]]:
    """(registry index, fp32 shard) of FP8 weights whose amax is taken from the updated masters.

    Without state only if they are gathered in FP8.
    """
    if registry is None or not (registry.recipe.stateful or gathered):
        return []
    if registry.recipe.weight_amax != "updated":
        return []
    shards = {entry.name: entry.shard for entry in gradients.entries}
    return [
        (index, shards[f"{module}.weight"])
        for index, (module, role) in enumerate(registry.keys)
        if role == "weight"
    ]
