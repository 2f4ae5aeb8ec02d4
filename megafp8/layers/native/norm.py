"""LayerNorm and RMSNorm over the hidden dim, computed in fp32 inside, one autograd node each."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafp8.layers.backend import LayerContext
from megafp8.layers.parameters import local


class _RmsNormFunction(torch.autograd.Function):
    """y = x * rsqrt(mean(x^2) + eps) * weight; saves x and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, rstd)
        return (x32.mul_(rstd) if x32 is not x else x * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        grad32 = grad.float()
        dweight = (grad32 * normed).flatten(0, -2).sum(0)
        grad32 = grad32 * weight
        mean = (grad32 * normed).mean(-1, keepdim=True)
        dx = (grad32 - normed.mul_(mean)).mul_(rstd)
        return dx.to(x.dtype), dweight.to(weight.dtype), None


class _LayerNormFunction(torch.autograd.Function):
    """LayerNorm of a 16-bit x with fp32 inside; saves x and two fp32 numbers per row.

    torch's own CPU kernel adds the gradients of weight and bias over all rows in the dtype of x:
    in bf16 a sum of ones stops growing at 256 (torch 2.13). Its CUDA kernel adds in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        shape = x.shape[-1:]
        y, mean, rstd = torch.native_layer_norm(
            x.float(), shape, weight.float(), bias.float(), epsilon
        )
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            grad.float(),
            x.float(),
            x.shape[-1:],
            mean,
            rstd,
            weight.float(),
            bias.float(),
            [True] * 3,
        )
        return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(bias.dtype), None


class Norm(nn.Module):
    """RMSNorm or LayerNorm with replicated parameters.

    Under sequence parallelism each tp rank sees its own tokens, so the local gradients are partial
    sums over tp; the training step adds them (`ParameterSpec.partial_over_tp`).
    """

    def __init__(self, context: LayerContext, name: str, kind: str, epsilon: float) -> None:
        super().__init__()
        self.kind, self.epsilon = kind, epsilon
        self.weight = context.factory(f"{name}.weight")
        self.bias = context.factory(f"{name}.bias") if kind == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h] in the dtype of x."""
        weight = local(self.weight)
        if self.bias is None:
            return _RmsNormFunction.apply(x, weight, self.epsilon)
        bias = local(self.bias)
        if x.device.type == "cpu" and x.dtype != torch.float32:
            return _LayerNormFunction.apply(x, weight, bias, self.epsilon)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.epsilon)

    def extra_repr(self) -> str:
        """Kind and epsilon."""
        return f"{self.kind}, eps={self.epsilon}"
