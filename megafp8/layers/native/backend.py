"""The native implementation of the layer backend."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from megafp8.layers.backend import CoreOptions, LayerContext, LinearOptions, NormOptions
from megafp8.layers.native.attention_core import SdpaCore
from megafp8.layers.native.fused_mlp import can_fuse, fused_mlp
from megafp8.layers.native.linear import NativeLinear
from megafp8.layers.norms import make_norm


class NativeBackend:
    """Layers in plain torch; FP8 GEMMs through `torch._scaled_mm` or exact emulation."""

    name = "native"

    def linear(self, context: LayerContext, options: LinearOptions) -> nn.Module:
        """See `Backend.linear`."""
        return NativeLinear(context, options)

    def norm(self, context: LayerContext, name: str, kind: str, epsilon: float) -> nn.Module:
        """See `Backend.norm`."""
        return make_norm(context, name, kind, epsilon)

    def norm_linear(
        self, context: LayerContext, norm: NormOptions, linear: LinearOptions
    ) -> tuple[nn.Module, nn.Module]:
        """See `Backend.norm_linear`; two separate layers."""
        first = self.norm(context, norm.name, norm.kind, norm.epsilon)
        return first, self.linear(context, linear)

    def attention_core(self, context: LayerContext, options: CoreOptions) -> nn.Module:
        """See `Backend.attention_core`."""
        assert not options.fp8
        return SdpaCore(options)

    def fused_mlp(
        self, fc1: nn.Module, fc2: nn.Module, swiglu: bool
    ) -> Callable[[Tensor, Any, Any], Tensor] | None:
        """See `Backend.fused_mlp`: where the fused kernels run and the linears are plain."""
        return fused_mlp if can_fuse(fc1, fc2, swiglu) else None

    def scope(self) -> AbstractContextManager[Any]:
        """See `Backend.scope`; nothing here."""
        return nullcontext()

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """See `Backend.recompute_contexts`; nothing here."""
        return nullcontext(), nullcontext()
