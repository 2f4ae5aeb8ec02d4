"""The feed-forward part of a block: fc1, activation (GELU, tanh-GELU or SwiGLU), fc2."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafp8.layers.backend import Backend, LayerContext, LinearOptions
from megafp8.layers.parameters import local


class _SwigluFunction(torch.autograd.Function):
    """silu(gate) * up for x = [gate, up] along the last dim; saves x alone.

    Halves, not interleaved columns: TransformerEngine's and Megatron's rank layout.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        silu = F.silu(gate)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(grad, silu, out=dup)
        dgate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return dx


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up for x = [gate, up] along the last dim."""
    return _SwigluFunction.apply(x)


class Mlp(nn.Module):
    """[s(/tp), b, h] -> [s(/tp), b, h].

    Args:
        context: what the layers of the stage share.
        backend: makes its linears.
        prefix: canonical name, "decoder.layers.N.mlp".
        fp8: whether linear_fc1 and linear_fc2 run in FP8.
        bias: whether they have biases.
        swiglu: gate the first by the second half of linear_fc1's output.
        activation: "gelu" or "gelu-tanh" without `swiglu`.
        linear_fc1: the first linear, where it is made together with the norm before it.
    """

    def __init__(
        self,
        context: LayerContext,
        backend: Backend,
        prefix: str,
        fp8: tuple[bool, bool],
        bias: bool,
        swiglu: bool,
        activation: str,
        linear_fc1: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.swiglu, self.approximate = swiglu, "tanh" if activation == "gelu-tanh" else "none"
        self.linear_fc1 = linear_fc1 or backend.linear(
            context, LinearOptions(f"{prefix}.linear_fc1", "column", fp8[0], bias)
        )
        self.linear_fc2 = backend.linear(
            context, LinearOptions(f"{prefix}.linear_fc2", "row", fp8[1], bias)
        )
        self._fused = backend.fused_mlp(self.linear_fc1, self.linear_fc2, swiglu)

    def forward(self, x: Tensor) -> Tensor:
        """fc2(activation(fc1(x)))."""
        if self._fused is not None and self._fp8():
            y = self._fused(x, self.linear_fc1, self.linear_fc2)
            bias: Any = self.linear_fc2.bias
            return y if bias is None else y + local(bias).flatten()
        x = self.linear_fc1(x)
        x = swiglu(x) if self.swiglu else F.gelu(x, approximate=self.approximate)
        return self.linear_fc2(x)

    def _fp8(self) -> bool:
        """Whether both linears run in FP8 at present."""
        return bool(self.linear_fc1.precision == self.linear_fc2.precision == "fp8")
