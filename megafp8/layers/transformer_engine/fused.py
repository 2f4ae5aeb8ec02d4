"""TE's LayerNormLinear: a norm and the linear after it as one module.

In FP8 TE's norm kernel writes the cast of its result and no BF16 tensor: one pass over memory less
than norm, then cast. It casts the fp32 result, the separate layers its BF16 rounding.
"""

from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from megafp8.layers.backend import LayerContext, LinearOptions
from megafp8.layers.native.norm import Norm
from megafp8.layers.parameters import local
from megafp8.layers.transformer_engine.linear import LinearParameters
from megafp8.layers.transformer_engine.user_buffers import NO_OVERLAP, Switches


class FoldedNorm(Norm):
    """Holds the parameters of a norm that the linear after it computes; hands on its input."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> the same tensor."""
        return x

    def extra_repr(self) -> str:
        """Kind, epsilon and where it is computed."""
        return f"{super().extra_repr()}, computed by the linear after it"


class TeNormLinear(LinearParameters, te.LayerNormLinear):
    """linear(norm(x)), column-parallel: [s(/tp), b, in] -> [s, b, out(/tp)].

    TE saves the norm's weight for backward as a saved tensor, so it is read again from the memory
    that FSDP2 refills. Gradients of the norm's parameters are those of this rank's tokens, as they
    are with a norm of its own.

    Args:
        context: what the layers of the stage share.
        norm: owner of the norm's parameters.
        options: of the linear.
        recipe: TE's recipe of the run; None without FP8.
        overlap: which traffic runs under its GEMMs.
    """

    def __init__(
        self,
        context: LayerContext,
        norm: FoldedNorm,
        options: LinearOptions,
        recipe: Any,
        overlap: Switches = NO_OVERLAP,
    ) -> None:
        assert options.mode == "column"
        spec = context.factory.specs[f"{options.name}.weight"]
        tp = context.mesh.tp
        super().__init__(
            spec.shape[-1],
            spec.numel // spec.shape[-1],
            eps=norm.epsilon,
            sequence_parallel=context.sequence_parallel,
            tp_group=tp.process_group,
            tp_size=tp.size,
            bias=options.bias and context.deferred is None,
            normalization=norm.kind,
            params_dtype=torch.float32,
            parallel_mode=options.mode if tp.size > 1 else None,
            device="meta",
            ub_overlap_ag=overlap.gather,
            ub_overlap_rs=overlap.scatter,
            ub_overlap_rs_dgrad=overlap.scatter_dgrad,
            ub_bulk_dgrad=overlap.bulk,
            ub_bulk_wgrad=overlap.bulk,
            ub_name=overlap.name,
            name=options.name,
        )
        self.take_linear(context, options, recipe)
        self._parameters.pop("layer_norm_weight")
        self._parameters.pop("layer_norm_bias", None)
        self._norm = (norm,)  # in a tuple: its parameters are not this module's

    def forward(self, x: Tensor) -> Tensor:
        """As `Backend.norm_linear` says; x is the norm's input."""
        (norm,) = self._norm
        self._show(local(norm.weight), None if norm.bias is None else local(norm.bias))
        try:
            with self.precision_context():
                y = super().forward(x)
                if self.observed:
                    with torch.no_grad():
                        self.show_casts(Norm.forward(norm, x), y)
                return self.finish(y)
        finally:
            self._show(None, None)

    def _show(self, weight: Tensor | None, bias: Tensor | None) -> None:
        # Past torch's own __setattr__, which takes what is local to a parameter for a parameter.
        self.fast_setattr("layer_norm_weight", weight)
        self.fast_setattr("layer_norm_bias", bias)
