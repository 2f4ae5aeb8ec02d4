"""The TransformerEngine implementation of the layer backend."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import transformer_engine.pytorch as te
from torch import Tensor, nn

from megafp8.config.user_buffers import UserBufferOptions
from megafp8.layers.backend import CoreOptions, LayerContext, LinearOptions, NormOptions
from megafp8.layers.native.attention_core import SdpaCore
from megafp8.layers.norms import make_norm
from megafp8.layers.transformer_engine.attention import TeCore
from megafp8.layers.transformer_engine.fused import FoldedNorm, TeNormLinear
from megafp8.layers.transformer_engine.linear import TeLinear
from megafp8.layers.transformer_engine.recipes import te_recipe
from megafp8.layers.transformer_engine.traffic import count_traffic
from megafp8.layers.transformer_engine.user_buffers import initialize, switches
from megafp8.numerics import Recipe
from megafp8.parallel.mesh import Mesh


@dataclass(frozen=True)
class TeOptions:
    """Which of TE's modules a run takes beside its linears.

    Attributes:
        fused_norms: LayerNormLinear for a norm and the linear after it.
        core: DotProductAttention, else torch's SDPA.
        fp8_core: its products in FP8 where the plan says so.
        user_buffers: of `--tp-comm-overlap`; None without.
    """

    fused_norms: bool = True
    core: bool = True
    fp8_core: bool = False
    user_buffers: UserBufferOptions | None = None


class TransformerEngineBackend:
    """Linears, fused norms and attention cores of TE; norms that stand alone are native.

    TE's norms are operations of its fuser, which differentiates their own plain parameter and reads
    it again in backward; ours are DTensors that FSDP2 swaps. The native norm is one autograd node
    with fp32 statistics, and the same in both backends.

    Args:
        recipe: of the run; None without FP8.
        mesh: the grid, whose `stage` ranks share scales.
        options: which modules.
    """

    name = "transformer_engine"

    def __init__(self, recipe: Recipe | None, mesh: Mesh, options: TeOptions = TeOptions()) -> None:
        self._options = options
        self._recipe: Any = None if recipe is None else te_recipe(recipe, options.fp8_core)
        self._group = mesh.stage.process_group
        count_traffic(mesh.tp)
        if options.user_buffers is not None:
            initialize(options.user_buffers, mesh.tp.size)

    def linear(self, context: LayerContext, options: LinearOptions) -> nn.Module:
        """See `Backend.linear`."""
        overlap = switches(self._options.user_buffers, options.name)
        return TeLinear(context, options, self._recipe, overlap)

    def norm(self, context: LayerContext, name: str, kind: str, epsilon: float) -> nn.Module:
        """See `Backend.norm`."""
        return make_norm(context, name, kind, epsilon)

    def norm_linear(
        self, context: LayerContext, norm: NormOptions, linear: LinearOptions
    ) -> tuple[nn.Module, nn.Module]:
        """See `Backend.norm_linear`."""
        if not self._options.fused_norms or context.norm_impl != "native":
            first = self.norm(context, norm.name, norm.kind, norm.epsilon)
            return first, self.linear(context, linear)
        folded = FoldedNorm(context, norm.name, norm.kind, norm.epsilon)
        overlap = switches(self._options.user_buffers, linear.name)
        return folded, TeNormLinear(context, folded, linear, self._recipe, overlap)

    def attention_core(self, context: LayerContext, options: CoreOptions) -> nn.Module:
        """See `Backend.attention_core`."""
        if self._options.core:
            return TeCore(context, options, self._recipe)
        assert not options.fp8
        return SdpaCore(options)

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
