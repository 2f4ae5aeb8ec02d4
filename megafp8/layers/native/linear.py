"""The tensor-parallel linear: one autograd function, two kinds of operands (BF16/FP32 or FP8).

Three GEMMs, letters: m tokens of the GEMM, k input features, n output features, all per rank.

    fprop  y  = x  wT    [m, k] @ [k, n] -> [m, n]
    dgrad  dx = dy w     [m, n] @ [n, k] -> [m, k]
    wgrad  dw = dyT x    [n, m] @ [m, k] -> [n, k]

Communication with sequence parallelism (s split over tp outside the tensor-parallel region):

    column-parallel   forward: gather x          backward: gather the saved x, reduce-scatter dx
    row-parallel      forward: reduce-scatter y  backward: gather dy

and without it: column-parallel all-reduces dx in backward, row-parallel all-reduces y in forward.
FP8 operands are gathered as their one-byte payload. With one scale a tensor all ranks have the
same, and dy is quantized once for dgrad and wgrad; with scales for rows or blocks these travel too.
With `--fp8-tp-comm all` the reduce-scatters of FP8 linears are FP8 too, with scales of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from megafp8.config.recipes import RecipeSpec
from megafp8.errors import PrecisionError
from megafp8.layers.backend import LayerContext, LinearOptions
from megafp8.layers.native.granular import GranularOperands
from megafp8.layers.native.operands import (
    Fp8Operands,
    HighPrecisionOperands,
    Operands,
    TensorwiseOperands,
)
from megafp8.layers.parameters import accumulate_gradient, gradient_like, local
from megafp8.numerics import E4M3, Fp8Format, linear
from megafp8.parallel.collectives import LINEAR_KINDS, Pending
from megafp8.parallel.fp8_weights import WeightCast


class _LinearFunction(torch.autograd.Function):
    """y = x wT with the communication of the layer's mode; see the module docstring."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: DTensor, layer: "NativeLinear") -> Tensor:
        operands, gathers = layer.operands, layer.gathers_input
        x_saved, x_full = operands.enter("input", x.reshape(-1, x.shape[-1]), gathers)
        w = operands.weight(weight.to_local().flatten(0, -2), "fprop")
        y = operands.fprop(x_full, w)  # [m, k] @ [k, n] -> [m, n]
        if layer.options.mode == "row":
            y = layer.reduce(y, LINEAR_KINDS[1])[0]
        # FSDP frees and refills the storage of a gathered weight between forward and backward, so
        # the weight itself is saved, unless its FP8 cast is kept for the whole step anyway.
        ctx.kept_weight = w if operands.keeps_weight else None
        saved, ctx.x_rest = operands.pack(x_saved)
        ctx.save_for_backward(*([] if operands.keeps_weight else [weight.to_local()]), *saved)
        ctx.layer, ctx.weight = layer, weight
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    @once_differentiable  # casts have no derivative: a second one would silently be 0
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        layer, operands = ctx.layer, ctx.layer.operands
        saved = list(ctx.saved_tensors)
        w = ctx.kept_weight
        if w is None:
            w = operands.weight(saved.pop(0).flatten(0, -2), "dgrad")
        x_saved = operands.unpack("input", saved, ctx.x_rest)
        dy2 = grad.reshape(-1, grad.shape[-1])
        dy_wgrad, dy = operands.enter("grad_output", dy2, layer.gathers_grad)
        # x is gathered before dx is reduced: both use one communicator, and in this order the
        # reduce-scatter runs under wgrad.
        x_early = None
        if ctx.needs_input_grad[1] and layer.deferred is None:
            x_early = operands.gather_again(x_saved, layer.gathers_input)
        dx, work = None, None
        if ctx.needs_input_grad[0]:
            dx = operands.dgrad(dy, w)  # [m, n] @ [n, k] -> [m, k]
            if layer.options.mode == "column":
                dx, work = layer.reduce(dx, LINEAR_KINDS[1], async_op=True)

        def weight_gradient() -> Tensor:
            x = x_early
            if x is None:
                x = operands.gather_again(x_saved, layer.gathers_input)
            return operands.wgrad(dy_wgrad, x)  # [n, m] @ [m, k] -> [n, k]

        dw = layer.emit(ctx.weight, weight_gradient) if ctx.needs_input_grad[1] else None
        if work is not None:
            work.wait()
        if dx is not None:
            dx = dx.view(-1, *grad.shape[1:-1], dx.shape[-1])
        return dx, dw, None


def _operands(recipe: RecipeSpec) -> type[Fp8Operands] | type[GranularOperands]:
    if not recipe.per_tensor:
        return GranularOperands
    return Fp8Operands if recipe.stateful else TensorwiseOperands


class NativeLinear(nn.Module):
    """A tensor-parallel linear whose three GEMMs run in the compute dtype or, by recipe, in FP8.

    Attributes:
        precision: which of the two at present; see `SwitchableLayer`.
        operands: of its GEMMs at present.
        reduce_format: of its reduce-scatters over tp at present; None for the compute dtype.
        weight_cast: how FSDP gathers the weight as FP8 codes while it is FP8; None if never.
    """

    operands: Operands
    reduce_format: Fp8Format | None
    weight_cast: WeightCast | None = None

    def __init__(self, context: LayerContext, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        self.tp = context.mesh.tp
        self.sequence_parallel = context.sequence_parallel and self.tp.size > 1
        self.deferred = context.deferred
        self.weight = context.factory(f"{options.name}.weight")
        self.bias = context.factory(f"{options.name}.bias") if options.bias else None
        self.gathers_input = self.sequence_parallel and options.mode == "column"
        self.gathers_grad = self.sequence_parallel and options.mode == "row"
        self._high = HighPrecisionOperands(self.tp, context.compute_dtype)
        self._fp8 = self._fp8_operands(context) if options.fp8 else None
        self._fp8_reduce = E4M3 if context.fp8_reduce else None
        if options.fp8 and context.fp8_param_gather:
            assert context.registry is not None
            index = context.registry.index_of(options.name, "weight")
            self.weight_cast = WeightCast(context.registry, index)
        self._use(context.precision(options.fp8))

    def _fp8_operands(self, context: LayerContext) -> Fp8Operands | GranularOperands:
        assert context.registry is not None and context.recipe is not None
        return _operands(context.recipe.spec)(
            self.options.name,
            self.tp,
            context.registry,
            context.recipe,
            fp8_gather=context.fp8_gather,
            keeps_weight=context.cache_weights,
            kernels=context.kernels,
            wgrad_dtype=torch.float32 if context.fp32_wgrad else context.compute_dtype,
        )

    def set_precision(self, precision: str) -> None:
        """See `SwitchableLayer.set_precision`."""
        if precision == self.precision:
            return
        if self._fp8 is None:
            raise PrecisionError(f"{self.options.name}: {self.precision} alone, without FP8 scales")
        self._fp8.forget_weight()
        self._fp8.registry.hold(self.options.name, precision != "fp8")
        self._use(precision)

    def _use(self, precision: str) -> None:
        self.precision = precision
        if precision == "fp8":
            assert self._fp8 is not None
            self.operands, self.reduce_format = self._fp8, self._fp8_reduce
        else:
            self.operands, self.reduce_format = self._high, None

    def reduce(
        self, partial: Tensor, kind: str, async_op: bool = False
    ) -> tuple[Tensor, Pending | None]:
        """Sum over tp: to this rank's tokens with sequence parallelism, else to all ranks."""
        if self.sequence_parallel and self.reduce_format is not None:
            return self.tp.reduce_scatter_fp8(partial, kind, self.reduce_format, async_op)
        if self.sequence_parallel:
            return self.tp.reduce_scatter(partial, kind, async_op)
        return partial, self.tp.all_reduce(partial, "tp_all_reduce", async_op=async_op)

    def emit(self, weight: DTensor, compute: Callable[[], Tensor]) -> DTensor | None:
        """The weight gradient now, or queued for the W slot of a zero-bubble schedule."""
        if self.deferred is None:
            return gradient_like(compute(), weight)

        @torch.no_grad()
        def accumulate() -> None:
            accumulate_gradient(weight, compute())

        self.deferred.queue.append(accumulate)
        return None

    def forward(self, x: Tensor) -> Tensor:
        """[s(/tp), b, k] -> [s(/tp), b, n]; s is whole between a column and a row layer."""
        if self.operands is self._high and self.tp.size == 1 and self.deferred is None:
            return self._plain(x)
        y = _LinearFunction.apply(x, self.weight, self)
        if self.bias is not None:
            y = y + local(self.bias).flatten()
        return y

    def _plain(self, x: Tensor) -> Tensor:
        """One plain product: high precision without tensor parallelism and deferral."""
        bias = local(self.bias).flatten() if self.bias is not None else None
        return linear(x, local(self.weight).flatten(0, -2), bias)

    def extra_repr(self) -> str:
        """Name, mode and what each role's tensors are."""
        return f"{self.options.name}, {self.options.mode}, {self.operands!r}"
