"""TE's linear over this project's parameters and scale state.

Weights are DTensors on the tp axis under FSDP2; TE gets their local tensors. TE keeps no scale
state of its own: each quantizer's `scale` is a view of `ScaleRegistry.scale` and its `amax` a view
of `ScaleRegistry.pending_amax`, so TE's casts use the registry's scales and its amax kernels
(atomic maxima) are the recording. What follows from that:

- one update per optimizer step, with every algorithm and flag of the native backend, and no copy;
- checkpoints hold the registry, so a run moves between backends;
- a pass that records nothing (evaluation) uses a second set of quantizers with an amax of its own.

TE's update at the end of each autocast region and after each backward is off, because the module
says that it is registered with TE's global buffers while it is not: they stay empty.

With a recipe without state TE's own quantizers are used and the registry holds no tensor of ours.
"""

from contextlib import nullcontext
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from megafp8.layers.backend import LayerContext, LinearOptions
from megafp8.layers.transformer_engine.cached_weight import KeptWeight, ready_weight
from megafp8.layers.transformer_engine.recipes import PER_TENSOR
from megafp8.numerics import ROLES, ScaleRegistry

# TE's slots per direction (csrc/common.h of 2.20): forward input, weight, output; backward
# grad_output, grad_input. Outputs are never FP8 here.
SLOTS: dict[str, tuple[str | None, ...]] = {
    "scaling_fwd": ("input", "weight", None),
    "scaling_bwd": ("grad_output", None),
}


class TeLinear(te.Linear):
    """A tensor-parallel linear: [s(/tp), b, in] -> [s(/tp), b, out(/tp)].

    Args:
        context: what the layers of the stage share.
        options: of this layer.
        recipe: TE's recipe of the run; None without FP8.
    """

    # No `_extra_state` key: scale state is the registry's, and TE's is a pickle.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, context: LayerContext, options: LinearOptions, recipe: Any) -> None:
        spec = context.factory.specs[f"{options.name}.weight"]
        tp = context.mesh.tp
        super().__init__(
            spec.shape[-1],
            spec.numel // spec.shape[-1],
            sequence_parallel=context.sequence_parallel,
            tp_group=tp.process_group,
            tp_size=tp.size,
            parallel_mode=options.mode if tp.size > 1 else None,
            bias=options.bias,
            params_dtype=torch.float32,
            device="meta",
            name=options.name,
        )
        self.weight = context.factory(f"{options.name}.weight")
        if options.bias:
            self.bias = context.factory(f"{options.name}.bias")
        self.options, self._recipe = options, recipe
        self._registry: ScaleRegistry | None = None
        self._kept: KeptWeight | None = None
        self._delayed = False
        self._indices: dict[str, int] = {}
        # Quantizers by (slots, whether amaxes are recorded), made with the first FP8 forward.
        self._sets: dict[tuple[str, bool], list[Float8Quantizer]] = {}
        if options.fp8:
            assert context.registry is not None and recipe is not None
            self._registry = context.registry
            if context.cache_weights and context.registry.recipe.name in PER_TENSOR:
                self._kept = KeptWeight(context.registry)
            self._delayed = context.registry.recipe.name == "delayed"
        if self._delayed:
            assert context.registry is not None
            self._indices = {role: context.registry.register(options.name, role) for role in ROLES}
            # TE's mark of a module that is in its global buffers, with keys that are not there: it
            # is never added, and TE's reductions and updates run over empty lists.
            self.fp8_meta[FP8GlobalStateManager.get_buffer_info()] = [0, "none", 0, "none"]

    def set_meta_tensor(self, fwd: bool, recipe: Any) -> None:
        """Put quantizers over the registry's memory in place of TE's own."""
        super().set_meta_tensor(fwd, recipe)
        if not self._delayed:
            return
        assert self._registry is not None
        key = "scaling_fwd" if fwd else "scaling_bwd"
        for recording in (True, False):
            self._sets[key, recording] = self._make_quantizers(key, recording)
        self.quantizers[key] = self._sets[key, self._registry.recording]

    def _make_quantizers(self, key: str, recording: bool) -> list[Float8Quantizer]:
        registry, made = self._registry, []
        assert registry is not None
        for slot, role in enumerate(SLOTS[key]):
            template = self.fp8_meta[key]
            scale, amax = template.scale[slot : slot + 1], template.amax_history[0][slot : slot + 1]
            if role is not None:
                index = self._indices[role]
                scale = registry.scale[index : index + 1]
                # With "updated" the amax of a weight comes from its fp32 shards after the step.
                if recording and (role != "weight" or registry.recipe.weight_amax == "cast"):
                    amax = registry.pending_amax[index : index + 1]
            made.append(Float8Quantizer(scale, amax, template.dtype))
        return made

    def _get_weight_tensors(self) -> list[Tensor]:
        # fc1's [2, ffn/tp, h] is [2 * ffn/tp, h] to TE: its own [gate; up] layout.
        return [self.weight.to_local().flatten(0, -2)]  # type: ignore[operator]

    def _get_weight_and_bias_tensors(self) -> tuple[Tensor, Tensor | None]:
        (weight,) = self._get_weight_tensors()
        if self.fp8:
            quantizer = self.quantizers["scaling_fwd"][SLOTS["scaling_fwd"].index("weight")]
            weight = ready_weight(weight, quantizer, self._kept)
        bias = self.bias.to_local().flatten() if self.options.bias else None  # type: ignore[operator]
        return weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """As `Backend.linear` says, in FP8 or not as the plan says.

        `is_first_microbatch` is left at None: under FSDP2 TE keeps no FP8 weight. Where parameters
        stay gathered `KeptWeight` does, else each micro-batch casts it, to the same bytes.
        """
        if self.options.fp8:
            assert self._registry is not None
            assert FP8GlobalStateManager.is_fp8_enabled(), f"{self.options.name}: outside a scope"
            for key in SLOTS:
                if (key, True) in self._sets:
                    self.quantizers[key] = self._sets[key, self._registry.recording]
            return super().forward(x)
        # The recipe is named, or TE would look up the default of this GPU.
        off = te.autocast(enabled=False, recipe=self._recipe) if self._recipe else nullcontext()
        with off:
            return super().forward(x)

    def extra_repr(self) -> str:
        """Name, mode and what each role's tensors are."""
        kind = "high precision"
        if self._registry is not None:
            recipe = self._registry.recipe
            forward, gradient = recipe.forward_format.name, recipe.gradient_format.name
            kind = f"fp8 {recipe.name}: input {forward}, weight {forward}, grad_output {gradient}"
        return f"{self.options.name}, {self.options.mode}, {kind}"
