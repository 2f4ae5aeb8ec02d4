"""FP8 weights that are handed to TE ready, so that it casts nothing: kept over a step, or gathered.

TE's linear takes a `Float8Tensor` as weight and multiplies with its codes. Two ways lead to one:

- where parameters stay gathered, a weight is cast once per step and kept, with the transpose that
  TE's backward reads (TE's own cache is keyed by micro-batch flags and is off under FSDP2);
- where FSDP2 gathers FP8, the codes and their scale are there already.

The gradient is that of the values: it goes to the high-precision weight as it is.
"""

from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from megafp8.numerics import ScaleRegistry


class _StandInFunction(torch.autograd.Function):
    """The FP8 payload in the forward pass, the weight it stands for in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, payload: Float8Tensor) -> Tensor:
        return Float8Tensor.make_like(payload)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def stand_in(weight: Tensor, payload: Float8Tensor) -> Tensor:
    """A weight [n, k] for one micro-batch: the payload's memory, the gradient of `weight`."""
    return _StandInFunction.apply(weight, payload)


def from_codes(
    codes: Tensor, scale_inv: Tensor, quantizer: Any, dtype: torch.dtype
) -> Float8Tensor:
    """Wrap FP8 codes without a copy.

    The transpose for backward is made there, from the same memory: FSDP2 may free and refill it in
    between.

    Args:
        codes: [n, k], float8 or their bytes, contiguous.
        scale_inv: fp32, one element; the codes' values are `codes * scale_inv`.
        quantizer: of the weight; says the FP8 format.
        dtype: what the weight counts as, TE's activation dtype.
    """
    own = quantizer.copy()
    own.internal = False
    own.set_usage(rowwise=True, columnwise=False)
    return Float8Tensor(
        shape=codes.shape,
        dtype=dtype,
        data=codes.view(torch.uint8),
        fp8_scale_inv=scale_inv.reshape(1),
        fp8_dtype=quantizer.dtype,
        quantizer=own,
        device=codes.device,
    )


class KeptWeight:
    """One linear's weight in FP8 while its parameters stay gathered.

    A kept cast belongs to one version of the registry, which changes with every scale update, every
    step and every load. Evaluation keeps one of its own: it records no amax, and training must not
    find the work done.
    """

    def __init__(self, registry: ScaleRegistry) -> None:
        self._registry = registry
        self._version: tuple[int, bool] | None = None
        self._payload: Float8Tensor | None = None

    @torch.no_grad()
    def payload(self, weight: Tensor, quantizer: Any) -> Float8Tensor:
        """The cast of this version, made if need be.

        Args:
            weight: [n, k] in the compute dtype.
            quantizer: TE's, for weights; it records the amax, if this pass records any.
        """
        version = (self._registry.version, self._registry.recording)
        if self._payload is None or self._version != version:
            internal, quantizer.internal = quantizer.internal, False
            # A forward pass without gradients reads no transpose.
            quantizer.set_usage(rowwise=True, columnwise=self._registry.recording)
            self._payload, self._version = quantizer.quantize(weight.detach()), version
            quantizer.internal = internal
        return self._payload
