"""The MLP as one autograd node where SwiGLU is fused with the casts on both of its sides.

    forward    h = fc1(x)              a = swiglu(h), only as FP8       y = fc2(a)
    backward   da = dgrad of fc2       dh = swiglu'(da, h), only as FP8  dx = dgrad of fc1

Neither a nor dh exists in 16 bits, which saves writing and reading both, and h alone is kept in
16 bits (as in the separate operations). Products, communication and values are the linears' own.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from megafp8.layers.native.casting import for_wgrad
from megafp8.layers.native.linear import NativeLinear
from megafp8.layers.native.operands import Fp8Operands
from megafp8.numerics import QuantizedTensor
from megafp8.parallel.collectives import LINEAR_KINDS


def can_fuse(fc1: Any, fc2: Any, swiglu: bool) -> bool:
    """Whether the MLP of these two linears can be one node; decided once, at construction.

    It takes delayed FP8 in both, fused kernels, and no bias in between. Sequence parallelism would
    have to gather operands between the products. While one of them is switched to high precision
    the operations are separate.
    """
    if not swiglu or not (isinstance(fc1, NativeLinear) and isinstance(fc2, NativeLinear)):
        return False
    return fc1.bias is None and all(
        isinstance(linear.operands, Fp8Operands)
        and linear.operands.recipe.stateful
        and linear.operands.cast.kernels.fused
        and linear.operands.fp8_wgrad
        and not linear.sequence_parallel
        for linear in (fc1, fc2)
    )


def fused_mlp(x: Tensor, fc1: NativeLinear, fc2: NativeLinear) -> Tensor:
    """[s, b, h] -> [s, b, h]; without fc2's bias."""
    return _FusedMlpFunction.apply(x, fc1.weight, fc2.weight, fc1, fc2)


class _FusedMlpFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: DTensor, w2: DTensor, fc1: NativeLinear, fc2: NativeLinear
    ) -> Tensor:
        ops1, ops2 = fc1.operands, fc2.operands
        assert isinstance(ops1, Fp8Operands) and isinstance(ops2, Fp8Operands)
        x_saved, x8 = ops1.enter("input", x.reshape(-1, x.shape[-1]), False)
        weight1 = ops1.weight(w1.to_local().flatten(0, -2), "fprop")
        h = ops1.fprop(x8, weight1)  # [m, 2f]
        a8 = ops2.cast.swiglu(h)
        weight2 = ops2.weight(w2.to_local().flatten(0, -2), "fprop")
        y = fc2.reduce(ops2.fprop(a8, weight2), LINEAR_KINDS[1])[0]
        # As in a single linear: a kept cast, else the parameter, whose storage FSDP refills.
        keeps = ops1.keeps_weight and ops2.keeps_weight
        ctx.kept = (weight1, weight2) if keeps else None
        (x_data,), x_rest = ops1.pack(x_saved)
        (a_data,), a_rest = ops2.pack(for_wgrad(a8))
        weights = [] if keeps else [w1.to_local(), w2.to_local()]
        ctx.save_for_backward(x_data, h, a_data, *weights)
        ctx.layers, ctx.weights = (fc1, fc2), (w1, w2)
        ctx.rests = (x_rest, a_rest)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, DTensor | None, DTensor | None, None, None]:
        fc1, fc2 = ctx.layers
        x_data, h, a_data, *weights = ctx.saved_tensors
        weight1, weight2 = ctx.kept or [
            layer.operands.weight(w.flatten(0, -2), "dgrad")
            for layer, w in zip(ctx.layers, weights, strict=True)
        ]
        x8 = fc1.operands.unpack("input", [x_data], ctx.rests[0])
        a8 = fc2.operands.unpack("input", [a_data], ctx.rests[1])
        _, dy8 = fc2.operands.enter("grad_output", grad.reshape(-1, grad.shape[-1]), False)
        da = fc2.operands.dgrad(dy8, weight2)  # [m, f]
        dw2 = fc2.emit(ctx.weights[1], _wgrad(fc2, dy8, a8))
        dh8 = fc1.operands.cast.swiglu_backward(da, h)
        dx, work = None, None
        if ctx.needs_input_grad[0]:
            dx = fc1.operands.dgrad(dh8, weight1)
            dx, work = fc1.reduce(dx, LINEAR_KINDS[1], async_op=True)
        dw1 = fc1.emit(ctx.weights[0], _wgrad(fc1, dh8, x8))
        if work is not None:
            work.wait()
        if dx is not None:
            dx = dx.view(*grad.shape[:-1], dx.shape[-1])
        return dx, dw1, dw2, None, None


def _wgrad(layer: NativeLinear, dy: QuantizedTensor, x: QuantizedTensor) -> Callable[[], Tensor]:
    return lambda: layer.operands.wgrad(dy, x)
