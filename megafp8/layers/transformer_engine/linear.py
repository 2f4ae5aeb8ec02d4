"""TE's linear over this project's parameters and scale state (`registry_quantizers.py`).

Weights are DTensors on the tp axis under FSDP2; TE gets their local tensors.
"""

from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from megafp8.layers.backend import LayerContext, LinearOptions
from megafp8.layers.parameters import local
from megafp8.layers.transformer_engine.cached_weight import GatheredInFp8, KeptWeight, ready_weight
from megafp8.layers.transformer_engine.deferred import DeferredWeightStore
from megafp8.layers.transformer_engine.registry_quantizers import RegistryQuantizers, Slots
from megafp8.layers.transformer_engine.user_buffers import NO_OVERLAP, Switches
from megafp8.parallel.fp8_weights import WeightCast

# TE's slots per direction (csrc/common.h of 2.20): forward input, weight, output; backward
# grad_output, grad_input. Outputs are never FP8 here.
SLOTS: Slots = {
    "scaling_fwd": ("input", "weight", None),
    "scaling_bwd": ("grad_output", None),
}


class LinearParameters(RegistryQuantizers):
    """What TE's modules with one linear share: its parameters and how TE is shown them.

    Under a zero-bubble schedule weight gradients go to its queue, and the bias, whose gradient TE
    leaves to that of the weight, is added outside of TE.
    """

    weight: Any
    bias: Any
    use_bias: bool
    wgrad_store: Any

    def take_linear(self, context: LayerContext, options: LinearOptions, recipe: Any) -> None:
        """Replace TE's parameters on `meta` by ours, and attach to the scale registry."""
        self.options, self._deferred = options, context.deferred
        self.weight = context.factory(f"{options.name}.weight")
        if options.bias:
            self.bias = context.factory(f"{options.name}.bias")
        if context.deferred is not None:
            self.wgrad_store = DeferredWeightStore(context.deferred, lambda: self.weight)
        self.attach(options.name, context, options.fp8, recipe, SLOTS)
        self._kept: KeptWeight | None = None
        if self._registry is not None and self._registry.recipe.spec.per_tensor:
            self._kept = KeptWeight(self._registry) if context.cache_weights else None
        self.weight_cast: WeightCast | None = None
        if context.fp8_param_gather and self._registry is not None:
            index = self._registry.index_of(options.name, "weight")
            self.weight_cast = WeightCast(self._registry, index)

    def set_precision(self, precision: str) -> None:
        """See `SwitchableLayer.set_precision`."""
        super().set_precision(precision)
        if self._kept is not None:
            self._kept.forget()

    def _get_weight_tensors(self) -> list[Tensor]:
        # fc1's [2, ffn/tp, h] is [2 * ffn/tp, h] to TE: its own [gate; up] layout.
        weight = local(self.weight).flatten(0, -2)
        if self._deferred is not None:
            # A leaf: the gradient that TE leaves out must not come back to our weight as zeros.
            weight = weight.detach().requires_grad_(self.weight.requires_grad)
        return [weight]

    def _get_weight_and_bias_tensors(self) -> tuple[Tensor, Tensor | None]:
        (weight,) = self._get_weight_tensors()
        if self.fp8:  # in this pass
            weight = ready_weight(weight, self._get_weight_quantizers()[0], self._kept)
        return weight, local(self.bias).flatten() if self.use_bias else None

    def finish(self, y: Tensor) -> Tensor:
        """Add the bias where TE does not."""
        if self.options.bias and not self.use_bias:
            y = y + local(self.bias).flatten()
        return y

    def show_casts(self, x: Tensor, y: Tensor) -> None:
        """Show the observer what a forward and its backward cast; see `show_cast`.

        Args:
            x: the input of the GEMM in high precision.
            y: what TE gave.
        """
        (weight,) = self._get_weight_tensors()
        self.show_cast("input", "scaling_fwd", 0, x)
        if isinstance(weight, GatheredInFp8):
            self.show_cast("weight", "scaling_fwd", 1, None, weight.quantized())
        else:
            self.show_cast("weight", "scaling_fwd", 1, weight)
        if y.requires_grad:
            y.register_hook(lambda dy: self.show_cast("grad_output", "scaling_bwd", 0, dy))

    def extra_repr(self) -> str:
        """Name, mode and what each role's tensors are."""
        return f"{self.options.name}, {self.options.mode}, {self.precision_repr()}"


class TeLinear(LinearParameters, te.Linear):
    """A tensor-parallel linear: [s(/tp), b, in] -> [s(/tp), b, out(/tp)].

    Args:
        context: what the layers of the stage share.
        options: of this layer.
        recipe: TE's recipe of the run; None without FP8.
        overlap: which traffic runs under its GEMMs.
    """

    def __init__(
        self,
        context: LayerContext,
        options: LinearOptions,
        recipe: Any,
        overlap: Switches = NO_OVERLAP,
    ) -> None:
        spec = context.factory.specs[f"{options.name}.weight"]
        tp = context.mesh.tp
        super().__init__(
            spec.shape[-1],
            spec.numel // spec.shape[-1],
            sequence_parallel=context.sequence_parallel,
            tp_group=tp.process_group,
            tp_size=tp.size,
            parallel_mode=options.mode if tp.size > 1 else None,
            bias=options.bias and context.deferred is None,
            params_dtype=torch.float32,
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

    def forward(self, x: Tensor) -> Tensor:
        """As `Backend.linear` says, in FP8 or not as the plan says.

        `is_first_microbatch` is left at None: under FSDP2 TE keeps no FP8 weight. Where parameters
        stay gathered `KeptWeight` does, else each micro-batch casts it, to the same bytes.
        """
        with self.precision_context():
            y = super().forward(x)
            if self.observed:
                self.show_casts(x, y)
            return self.finish(y)
