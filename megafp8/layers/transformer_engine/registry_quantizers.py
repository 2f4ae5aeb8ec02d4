"""Quantizers of TE's modules over this project's scale state, shared by every module that has some.

TE keeps no scale state of its own: each quantizer's `scale` is a view of `ScaleRegistry.scale` and
its `amax` a view of `ScaleRegistry.pending_amax`, so TE's casts use the registry's scales and its
amax kernels (atomic maxima) are the recording. What follows from that:

- one update per optimizer step, with every algorithm and flag of the native backend, and no copy;
- checkpoints hold the registry, so a run moves between backends;
- a pass that records nothing (evaluation) uses a second set of quantizers with an amax of its own.

TE's update at the end of each autocast region and after each backward is off, because the module
says that it is registered with TE's global buffers while it is not: they stay empty.

With a recipe without state TE's own quantizers are used, and no tensor is registered.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

from megafp8.errors import PrecisionError
from megafp8.layers.backend import LayerContext
from megafp8.numerics import Role

# TE's slots by direction ("scaling_fwd", "scaling_bwd"); None where the slot is not used.
Slots = Mapping[str, tuple[Role | None, ...]]


class RegistryQuantizers(TransformerEngineBaseModule):
    """Mixin, named before the TE class: its quantizers lie over a scale registry's memory."""

    # No `_extra_state` key: scale state is the registry's, and TE's is a pickle.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    precision: str  # at present; see `SwitchableLayer`

    def attach(
        self, name: str, context: LayerContext, fp8: bool, recipe: Any, slots: Slots
    ) -> None:
        """Register the module's tensors; once, after TE's constructor.

        Args:
            name: canonical module name.
            context: of the stage; its registry holds the scales.
            fp8: whether the module can run in FP8, and starts so.
            recipe: TE's recipe of the run; None without FP8.
            slots: which roles TE's slots hold.
        """
        registry = context.registry if fp8 else None
        assert registry is not None or not fp8
        self.canonical_name, self._recipe, self._registry = name, recipe, registry
        self.precision = context.precision(fp8)
        self._slots = slots
        # Quantizers by (slots, whether amaxes are recorded), made with the first FP8 forward.
        self._sets: dict[tuple[str, bool], list[Float8Quantizer]] = {}
        self._indices: dict[Role, int] = {}
        assert registry is None or recipe is not None
        self._delayed = registry is not None and registry.recipe.stateful
        if registry is None or not self._delayed:
            return
        roles: list[Role] = [role for key in slots for role in slots[key] if role is not None]
        self._indices = {role: registry.register(name, role) for role in roles}
        # TE's mark of a module that is in its global buffers, with keys that are not there: it
        # is never added, and TE's reductions and updates run over empty lists.
        self.fp8_meta[FP8GlobalStateManager.get_buffer_info()] = [0, "none", 0, "none"]

    def set_precision(self, precision: str) -> None:
        """See `SwitchableLayer.set_precision`."""
        if precision == self.precision:
            return
        if self._registry is None:
            raise PrecisionError(
                f"{self.canonical_name}: {self.precision} alone, without FP8 scales"
            )
        self._registry.hold(self.canonical_name, precision != "fp8")
        self.precision = precision

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
        for slot, role in enumerate(self._slots[key]):
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

    def precision_context(self) -> AbstractContextManager[Any]:
        """What TE's forward runs in: the stage's autocast for FP8, else a disabled one in it."""
        if self._registry is None or self.precision != "fp8":
            # The recipe is named, or TE would look up the default of this GPU.
            return (
                te.autocast(enabled=False, recipe=self._recipe) if self._recipe else nullcontext()
            )
        assert FP8GlobalStateManager.is_fp8_enabled(), f"{self.canonical_name}: outside a scope"
        for key in self._slots:
            if (key, True) in self._sets:
                self.quantizers[key] = self._sets[key, self._registry.recording]
        return nullcontext()

    @property
    def observed(self) -> bool:
        """Whether an observer wants to see the casts of this forward."""
        registry = self._registry
        return registry is not None and registry.observer is not None and self.precision == "fp8"

    @torch.no_grad()
    def show_cast(
        self, role: Role, key: str, slot: int, x: Tensor | None, cast: Any = None
    ) -> None:
        """Show the observer x and its cast, which is made anew if it is not given.

        TE casts inside its modules, where nothing is to be seen. Its quantizer gives the same codes
        again; the set that records nothing leaves the registry as it is.

        Args:
            role: of x.
            key: "scaling_fwd" or "scaling_bwd".
            slot: TE's, of that direction.
            x: in high precision.
            cast: in FP8.
        """
        registry = self._registry
        if registry is None or registry.observer is None:
            return
        if cast is None:
            assert x is not None
            quantizers: Any = self._sets.get((key, False)) or self.quantizers[key]
            quantizer = quantizers[slot].copy()
            quantizer.internal = False
            quantizer.set_usage(rowwise=True, columnwise=False)
            cast = quantizer.quantize(x.detach().flatten(0, -2))
        registry.observer(self.canonical_name, role, x, cast)

    def precision_repr(self) -> str:
        """What each role's tensors are."""
        if self._registry is None or self.precision != "fp8":
            return "high precision"
        recipe = self._registry.recipe
        forward, gradient = recipe.forward_format.name, recipe.gradient_format.name
        return f"fp8 {recipe.name}: input {forward}, weight {forward}, grad_output {gradient}"
