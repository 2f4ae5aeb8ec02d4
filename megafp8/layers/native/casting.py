"""How a linear's tensors become FP8: one fused kernel, or plain torch operations; equal values."""

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.numerics import (
    Fp8Format,
    QuantizedTensor,
    Recipe,
    Role,
    ScaleRegistry,
    compute_amax,
    quantize,
    quantize_tensor,
)
from megafp8.numerics.kernels import KernelChoice
from megafp8.numerics.scales import current_scale
from megafp8.parallel.collectives import CommGroup


class DelayedCasts:
    """Casts with the registry's scales and records amaxes, without a host sync.

    With fused kernels one read of a tensor gives codes, amax and the transposed codes that dgrad
    (of weights) and wgrad (of activations and gradients) multiply; nothing is transposed later.

    Args:
        registry: scale state of this rank.
        recipe: formats.
        index: of the layer's tensors in the registry, by role.
        kernels: which implementation.
        tp: the ranks that may hold parts of one tensor.
    """

    def __init__(
        self,
        registry: ScaleRegistry,
        recipe: Recipe,
        index: dict[Role, int],
        kernels: KernelChoice,
        tp: CommGroup,
    ) -> None:
        self.registry, self.recipe, self.index = registry, recipe, index
        self.kernels, self.tp = kernels, tp

    def __call__(
        self,
        role: Role,
        x: Tensor,
        record: bool = True,
        rows: bool = True,
        columns: bool = False,
        shared: bool = False,
    ) -> QuantizedTensor:
        """Cast x [m, k].

        Args:
            role: of x.
            x: in high precision.
            record: whether the amax of x is recorded (nothing is while the registry pauses).
            rows: codes as x lies are wanted (fprop's x and w, dgrad's dy).
            columns: a transposed copy is wanted (dgrad's w, wgrad's dy and x). Without fused
                kernels there is none, and products that want one make it.
            shared: tp ranks hold parts of one tensor and need one scale. Delayed scales are shared
                in any case: the reduction of the amaxes spans the tp ranks.
        """
        index, fmt = self.index[role], self.recipe.format(role)
        scale, scale_inv = self.registry.scale_of(index), self.registry.scale_inv_of(index)
        if not self.kernels.fused:
            if record and self.registry.recording:
                self.registry.record(index, compute_amax(x, self.recipe.drops_nan))
            made = QuantizedTensor(quantize(x, scale, fmt), scale_inv, fmt)
            return self.registry.observed(index, x, made)
        # Imported here: it imports Triton.
        from megafp8.numerics.kernels.cast import cast

        pending = self._pending(index) if record else None
        drop_nan = self.recipe.drops_nan
        codes, transposed = cast(
            x, scale, fmt, amax=pending, drop_nan=drop_nan, codes=rows, transposed=columns
        )
        made = _operand(codes, transposed, scale_inv, fmt)
        return self.registry.observed(index, x, made)

    def swiglu(self, h: Tensor) -> QuantizedTensor:
        """Cast silu(gate) * up of h = [gate, up] [m, 2f] as an input, in one kernel, with columns.

        Fused kernels only, as `swiglu_backward`.
        """
        from megafp8.numerics.kernels.fused import swiglu_cast

        index, fmt = self.index["input"], self.recipe.format("input")
        scale, pending = self.registry.scale_of(index), self._pending(index)
        codes, transposed = swiglu_cast(
            h, scale, fmt, amax=pending, drop_nan=self.recipe.drops_nan, transposed=True
        )
        made = _operand(codes, transposed, self.registry.scale_inv_of(index), fmt)
        return self.registry.observed(index, None, made)

    def swiglu_backward(self, grad: Tensor, h: Tensor) -> QuantizedTensor:
        """Cast the gradient of SwiGLU's input [m, 2f] as a grad_output, with columns."""
        from megafp8.numerics.kernels.fused import swiglu_backward_cast

        index, fmt = self.index["grad_output"], self.recipe.format("grad_output")
        scale, pending = self.registry.scale_of(index), self._pending(index)
        codes, transposed = swiglu_backward_cast(
            grad, h, scale, fmt, amax=pending, drop_nan=self.recipe.drops_nan, transposed=True
        )
        made = _operand(codes, transposed, self.registry.scale_inv_of(index), fmt)
        return self.registry.observed(index, None, made)

    def _pending(self, index: int) -> Tensor | None:
        return self.registry.pending_of(index) if self.registry.recording else None

    def with_columns(self, operand: QuantizedTensor) -> QuantizedTensor:
        """Add the transposed copy to codes that came over the network."""
        if not self.kernels.fused:
            return operand
        from megafp8.numerics.kernels.cast import transpose_codes

        return QuantizedTensor(
            operand.data,
            operand.scale_inv,
            operand.format,
            transposed=transpose_codes(operand.data),
        )


class TensorwiseCasts(DelayedCasts):
    """Casts with one scale a tensor, of the tensor itself; otherwise as `DelayedCasts`.

    The parts of a tensor that is gathered over tp get one scale, by a MAX all-reduce of a scalar,
    so that their codes are those of the whole. Two reads: the amax has to be known first.
    """

    def __call__(
        self,
        role: Role,
        x: Tensor,
        record: bool = True,
        rows: bool = True,
        columns: bool = False,
        shared: bool = False,
    ) -> QuantizedTensor:
        """Cast x [m, k], as `DelayedCasts` does."""
        if self.kernels.fused:
            from megafp8.numerics.kernels.cast import cast, record_amax

            amax = torch.zeros((), dtype=torch.float32, device=x.device)
            record_amax(x, amax)
        else:
            amax = compute_amax(x)
        index = self.index[role]
        if record and self.registry.recording:
            self.registry.record(index, amax)
        if shared:
            # A MAX reduction may lose NaN; inf gives the same scale.
            amax = torch.nan_to_num(amax, nan=torch.inf, posinf=torch.inf)
            self.tp.all_reduce(amax, "amax_all_reduce", dist.ReduceOp.MAX)
        fmt = self.recipe.format(role)
        if not self.kernels.fused:
            made = quantize_tensor(x, fmt, amax, self.recipe.power_of_2_scales)
            return self.registry.observed(index, x, made)
        scale = current_scale(amax, fmt, power_of_2=self.recipe.power_of_2_scales)
        codes, transposed = cast(x, scale, fmt, codes=rows, transposed=columns)
        made = _operand(codes, transposed, scale.reciprocal(), fmt)
        return self.registry.observed(index, x, made)


def _operand(
    codes: Tensor | None, transposed: Tensor | None, scale_inv: Tensor, fmt: Fp8Format
) -> QuantizedTensor:
    """An operand of what a kernel has made; without codes a view of the transposed ones."""
    if codes is None:
        assert transposed is not None, "neither rows nor columns are wanted"
        codes = transposed.t()
    return QuantizedTensor(codes, scale_inv, fmt, transposed=transposed)


def for_wgrad(operand: QuantizedTensor) -> QuantizedTensor:
    """Return what wgrad needs of x and nothing else: the transposed codes, if there are some."""
    if operand.transposed is None:
        return operand
    return QuantizedTensor(
        operand.transposed.t(),
        operand.scale_inv,
        operand.format,
        transposed=operand.transposed,
    )
