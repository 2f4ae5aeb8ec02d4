"""How a linear's tensors become FP8: one fused kernel, or plain torch operations; equal values."""

from torch import Tensor

from megafp8.numerics import QuantizedTensor, Recipe, Role, ScaleRegistry, compute_amax, quantize
from megafp8.numerics.kernels import KernelChoice


class DelayedCasts:
    """Casts with the registry's scales and records amaxes, without a host sync.

    With fused kernels one read of a tensor gives codes, amax and the transposed codes that dgrad
    (of weights) and wgrad (of activations and gradients) multiply; nothing is transposed later.

    Args:
        registry: scale state of this rank.
        recipe: formats.
        index: of the layer's tensors in the registry, by role.
        kernels: which implementation.
    """

    def __init__(
        self,
        registry: ScaleRegistry,
        recipe: Recipe,
        index: dict[Role, int],
        kernels: KernelChoice,
    ) -> None:
        self.registry, self.recipe, self.index = registry, recipe, index
        self.kernels = kernels

    def __call__(
        self,
        role: Role,
        x: Tensor,
        record: Tensor | None = None,
        rows: bool = True,
        columns: bool = False,
    ) -> QuantizedTensor:
        """Cast x [m, k].

        Args:
            role: of x.
            x: in high precision.
            record: tensor whose amax is recorded: x itself, this rank's part of it, or None.
            rows: codes as x lies are wanted (fprop's x and w, dgrad's dy).
            columns: a transposed copy is wanted (dgrad's w, wgrad's dy and x). Without fused
                kernels there is none, and products that want one make it.
        """
        index, fmt = self.index[role], self.recipe.format(role)
        scale, scale_inv = self.registry.scale_of(index), self.registry.scale_inv_of(index)
        if not self.registry.recording:
            record = None
        if not self.kernels.fused:
            if record is not None:
                self.registry.record(index, compute_amax(record))
            return QuantizedTensor(quantize(x, scale, fmt), scale_inv, fmt)
        # Imported here: it imports Triton.
        from megafp8.numerics.kernels.cast import cast, record_amax

        pending = self.registry.pending_of(index) if record is not None else None
        if record is not None and record is not x:
            assert pending is not None
            record_amax(record, pending)
            pending = None
        codes, transposed = cast(x, scale, fmt, amax=pending, codes=rows, transposed=columns)
        data = codes if codes is not None else transposed
        assert data is not None, "neither rows nor columns are wanted"
        return QuantizedTensor(
            data if codes is not None else data.t(), scale_inv, fmt, transposed=transposed
        )

    def swiglu(self, h: Tensor) -> QuantizedTensor:
        """Cast silu(gate) * up of h = [gate, up] [m, 2f] as an input, in one kernel, with columns.

        Fused kernels only, as `swiglu_backward`.
        """
        from megafp8.numerics.kernels.fused import swiglu_cast

        index, fmt = self.index["input"], self.recipe.format("input")
        scale, pending = self.registry.scale_of(index), self._pending(index)
        codes, transposed = swiglu_cast(h, scale, fmt, amax=pending, transposed=True)
        assert codes is not None
        return QuantizedTensor(codes, self.registry.scale_inv_of(index), fmt, transposed=transposed)

    def swiglu_backward(self, grad: Tensor, h: Tensor) -> QuantizedTensor:
        """Cast the gradient of SwiGLU's input [m, 2f] as a grad_output, with columns."""
        from megafp8.numerics.kernels.fused import swiglu_backward_cast

        index, fmt = self.index["grad_output"], self.recipe.format("grad_output")
        scale, pending = self.registry.scale_of(index), self._pending(index)
        codes, transposed = swiglu_backward_cast(grad, h, scale, fmt, amax=pending, transposed=True)
        assert codes is not None
        return QuantizedTensor(codes, self.registry.scale_inv_of(index), fmt, transposed=transposed)

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
