"""The TransformerEngine implementation of the layer backend."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import transformer_engine.pytorch as te
from torch import Tensor, nn

from megafp8.layers.backend import LayerContext, LinearOptions
from megafp8.layers.native.norm import Norm
from megafp8.layers.transformer_engine.linear import TeLinear
from megafp8.layers.transformer_engine.recipes import delayed_scaling
from megafp8.layers.transformer_engine.traffic import count_traffic
from megafp8.numerics import Recipe
from megafp8.parallel.mesh import Mesh


class TransformerEngineBackend:
    """Linears of TE; norms are native.

    TE's norms are operations of its fuser, which differentiates their own plain parameter and reads
    it again in backward; ours are DTensors that FSDP2 swaps. The native norm is one autograd node
    with fp32 statistics, and the same in both backends.

    Args:
        recipe: of the run; None without FP8.
        mesh: the grid, whose `stage` ranks share scales.
    """

    name = "transformer_engine"

    def __init__(self, recipe: Recipe | None, mesh: Mesh) -> None:
        self._recipe: Any = None if recipe is None else delayed_scaling(recipe)
        self._group = mesh.stage.process_group
        count_traffic(mesh.tp)

    def linear(self, context: LayerContext, options: LinearOptions) -> nn.Module:
        """See `Backend.linear`."""
        return TeLinear(context, options, self._recipe)

    def norm(self, context: LayerContext, name: str, kind: str, epsilon: float) -> nn.Module:
        """See `Backend.norm`."""
        return Norm(context, name, kind, epsilon)

    def fused_mlp(
        self, fc1: nn.Module, fc2: nn.Module, swiglu: bool
    ) -> Callable[[Tensor, Any, Any], Tensor] | None:
        """See `Backend.fused_mlp`; none here."""
        return None

    def scope(self) -> AbstractContextManager[Any]:
        """The one enabled autocast around a stage's forward; BF16 layers nest a disabled one."""
        if self._recipe is None:
            return nullcontext()
        return te.autocast(enabled=True, recipe=self._recipe, amax_reduction_group=self._group)

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """See `Backend.recompute_contexts`.

        Backward runs outside the scope of the forward, so the second forward opens one. TE's own
        checkpoint stashes scales because its scales move within a step; the registry's do not.
        """
        return nullcontext(), self.scope()
