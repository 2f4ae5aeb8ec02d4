"""The cycle of FP8 scales around a training step: what casts saw, agreed on by ranks, updated."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.checkpoint import CheckpointRecord
from megafp8.checkpoint.agree import on_all_ranks
from megafp8.checkpoint.scale_checks import recorded_recipe
from megafp8.checkpoint.scale_state import scale_targets, scale_tensors, take_scales
from megafp8.config.precision import PrecisionConfig
from megafp8.numerics import ScaleRegistry, compute_amax
from megafp8.parallel.mesh import Mesh
from megafp8.train.parts import StatePart, Stored


class ScaleCycle(StatePart):
    """Moves the scales of a registry from step to step, equal on all ranks that share them.

    Per step: `begin`, `between_micro_batches` after each micro-batch but the last, `fault` before
    the step is decided on, and `end`. Without FP8, and where there is no state, each does what is
    left of it, down to nothing. Scales are a part of the run's state, which goes with the weights.

    Attributes:
        rule: what the last load did to scales that differ between ranks, in words; None where none
            do.
    """

    name = "FP8 scales"
    with_weights = True

    def __init__(
        self,
        registry: ScaleRegistry | None,
        precision: PrecisionConfig,
        mesh: Mesh,
        masters: Mapping[str, Tensor],
    ) -> None:
        """Look at the weights as they are now; a collective call of the stage's ranks.

        Args:
            registry: of this rank; None without FP8.
            precision: the run's.
            mesh: of this rank.
            masters: fp32 shards of this rank's parameters by canonical name, updated in place.
        """
        self.registry, self._mesh = registry, mesh
        self._shared = precision.fp8_reduce_amax
        # With one window entry per micro-batch, scales move before the step is known to be good.
        self._moves_within = registry is not None and precision.fp8_amax_window != "step"
        self.rule: str | None = None
        self._before: tuple[Tensor, Tensor] | None = None
        self._bad_before: Tensor | None = None
        self._bad_weights: Tensor | None = None
        indices = _master_indices(registry, precision.fp8 and precision.fp8_param_gather)
        self._weights = [masters[f"{module}.weight"] for module in indices]
        self._weight_indices = torch.tensor(
            list(indices.values()), dtype=torch.int64, device=mesh.world.device
        )
        self.refresh_weights()

    def begin(self) -> None:
        """Start a step: keep scales and windows that may have to be put back."""
        self._bad_before = None
        if self.registry is not None and self._moves_within:
            self._before = self.registry.scale.clone(), self.registry.amax_history.clone()

    def between_micro_batches(self) -> None:
        """Move the scales after a micro-batch, where windows have one entry for each.

        The last micro-batch's entry is made at the end of the step, with that of the weights.
        """
        if self.registry is not None and self._moves_within:
            self._bad_before = self._bad_casts(self.registry)
            self.registry.update(self._reduce)

    def end(self, skipped: bool) -> None:
        """Update all scales after the optimizer's step: one MAX all-reduce of one flat vector.

        One per step, or one per micro-batch. A skipped step changes no scale: those that moved
        within it are put back.
        """
        registry = self.registry
        if registry is None:
            return
        if skipped:
            registry.drop_pending()
            if self._before is not None:
                registry.restore(*self._before)
        elif not registry.recipe.stateful:
            registry.update()
            self.refresh_weights()
        else:
            if self._weights:
                registry.pending_amax[self._weight_indices] = self._weight_amaxes(registry)
            registry.update(self._reduce)

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Look at FP8 weights as they are now: at the start, after a load, after a step.

        A collective call of the stage's ranks. With delayed scaling weights without a history get
        the scale of their masters, the first time they are cast. Without state those that FSDP
        gathers in FP8 get their current scales.
        """
        if self.registry is None or not self._weights:
            return
        amax = self._weight_amaxes(self.registry)
        amax = torch.nan_to_num(amax, nan=torch.inf, posinf=torch.inf)  # MAX may lose NaN
        self.registry.take_current(self._weight_indices, self._reduce_weights(amax))

    def fault(self) -> Tensor | bool:
        """Bool scalar: whether this rank's casts saw an inf or NaN for which a step is left out.

        A cast turns inf into the largest FP8 number, so gradients may not show it. With
        `nonfinite_amax="freeze"`, which is TransformerEngine's way, such a step is taken.
        """
        if self.registry is None or self.registry.recipe.nonfinite_amax != "skip":
            return False
        return self._bad_casts(self.registry).any()

    def bad_names(self) -> list[str]:
        """This rank's FP8 tensors that held an inf or NaN in this step; syncs, for reports only."""
        if self.registry is None:
            return []
        keys = self.registry.keys
        bad = self._bad_casts(self.registry).nonzero().flatten().tolist()
        return [f"{keys[index][0]} (FP8 {keys[index][1]})" for index in bad]

    def tensors(self) -> dict[str, Tensor]:
        """Return scales and windows for a checkpoint, found equal where ranks share them."""
        return scale_tensors(self.registry, self._mesh, self._shared)

    def targets(self, path: Path, record: CheckpointRecord) -> dict[str, Tensor]:
        """Return tensors for scales and windows as a checkpoint has them, for all of its ranks."""
        return scale_targets(self.registry, record, path, self._mesh, self._shared)

    def take(self, stored: Stored) -> None:
        """Go on with a checkpoint's windows and look at the loaded weights; see `take_scales`.

        Raises:
            CheckpointError: on every rank; a stored scale or window is none.
        """
        before = recorded_recipe(stored.record)

        def mine() -> str | None:
            where = stored.path, self._mesh, self._shared, before
            return take_scales(self.registry, stored.tensors, stored.absent, *where)

        rules = on_all_ranks(f"loading {stored.path}", mine, None)
        self.rule = rules[self._mesh.world.rank]
        self.refresh_weights()

    def _bad_casts(self, registry: ScaleRegistry) -> Tensor:
        """Bool [N]: this rank's FP8 tensors that held an inf or NaN in this step."""
        bad = ~registry.pending_amax.isfinite()
        for seen in (self._bad_before, self._bad_weights):
            if seen is not None:
                bad |= seen
        return bad

    def _weight_amaxes(self, registry: ScaleRegistry) -> Tensor:
        """Fp32 [n]: largest |master| of this rank's FP8 weight shards.

        A cast would turn an inf that an update has left there into the largest FP8 number, and
        nothing of the next step would show it: the weights that hold one are remembered.
        """
        drop_nan = registry.recipe.drops_nan
        amax = torch.stack([compute_amax(shard, drop_nan) for shard in self._weights])
        self._bad_weights = torch.zeros(len(registry), dtype=torch.bool, device=amax.device)
        self._bad_weights[self._weight_indices] = ~amax.isfinite()
        return amax

    def _reduce(self, amax: Tensor) -> None:
        """Maximum over the ranks that share scales; without sharing, only what has to agree."""
        if self._shared:
            self._mesh.stage.all_reduce(amax, "amax_all_reduce", dist.ReduceOp.MAX)
        elif self._weights:
            weights = self._weight_indices
            amax[weights] = self._reduce_weights(amax[weights])

    def _reduce_weights(self, amax: Tensor) -> Tensor:
        """Maximum of weights' amaxes [n] over the ranks that share their scales.

        A weight is one tensor for all data-parallel ranks, of which each holds a shard: its scale
        has to cover the whole in any case. So with `--no-fp8-reduce-amax` weights still agree over
        data parallel, and ranks of a tensor-parallel group, which hold different parts, do not.
        """
        if self._shared:
            self._mesh.stage.all_reduce(amax, "amax_all_reduce", dist.ReduceOp.MAX)
            return amax
        # A row for each tp rank: one reduction over the stage's group, which is there already.
        rows = amax.new_zeros(self._mesh.layout.tp, len(amax))
        rows[self._mesh.tp_rank] = amax
        self._mesh.stage.all_reduce(rows, "amax_all_reduce", dist.ReduceOp.MAX)
        return rows[self._mesh.tp_rank]


def _master_indices(registry: ScaleRegistry | None, gathered: bool) -> dict[str, int]:
    """{module: registry index} of FP8 weights whose amax is taken from the updated masters.

    Without state only if they are gathered in FP8.
    """
    if registry is None or not (registry.recipe.stateful or gathered):
        return {}
    if registry.recipe.weight_amax != "updated":
        return {}
    return {module: index for index, (module, role) in enumerate(registry.keys) if role == "weight"}
