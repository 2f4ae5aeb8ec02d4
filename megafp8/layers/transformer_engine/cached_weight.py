"""FP8 weights that are handed to TE ready, so that it casts nothing: kept over a step, or gathered.

TE's linear takes a `Float8Tensor` as weight and multiplies with its codes. Two ways lead to one:

- where parameters stay gathered, a weight is cast once per step and kept, with the transpose that
  TE's backward reads (TE's own cache is keyed by micro-batch flags and is off under FSDP2);
- where FSDP2 gathers FP8 (`--fp8-param-gather`), the codes and their scale are there already.

The gradient is that of the values: it goes to the high-precision weight as it is.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

from megafp8.numerics import QuantizedTensor, ScaleRegistry


@runtime_checkable
class GatheredInFp8(Protocol):
    """A weight whose gather brought codes; a tensor too."""

    def quantized(self) -> QuantizedTensor:
        """The codes [n, k] and their scale."""
        ...


class _StandInFunction(torch.autograd.Function):
    """The FP8 payload in the forward pass, the weight it stands for in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, payload: Float8Tensor) -> Tensor:
        return Float8Tensor.make_like(payload)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def ready_weight(weight: Tensor, quantizer: Any, kept: "KeptWeight | None") -> Tensor:
    """The weight as TE gets it: ready in FP8 where it is kept or was gathered so, else as it is.

    Args:
        weight: [n, k] of this rank.
        quantizer: TE's, for weights; used only if this pass casts.
        kept: where a cast is kept; None where parameters are gathered anew.
    """
    if kept is not None:
        return _StandInFunction.apply(weight, kept.payload(weight, quantizer))
    if isinstance(weight, GatheredInFp8):
        return _StandInFunction.apply(weight, _from_gathered(weight, quantizer))
    return weight


def from_codes(
    codes: Tensor, scale_inv: Tensor, quantizer: Any, dtype: torch.dtype
) -> Float8Tensor:
    """Wrap FP8 codes without a copy.

    TE makes the transpose for backward there, from the same memory: FSDP2 may free and refill it in
    between.

    Args:
        codes: [n, k], float8 or their bytes, contiguous.
        scale_inv: fp32, one element; the values are `codes * scale_inv`.
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


def _from_gathered(weight: Any, quantizer: Any) -> Float8Tensor:
    quantized = weight.quantized()
    return from_codes(quantized.data, quantized.scale_inv, quantizer, weight.dtype)


class KeptWeight:
    """One linear's weight in FP8 while its parameters stay gathered.

    It belongs to one version of the registry, which changes with every scale update, every step and
    every load. Evaluation keeps one of its own: it records no amax, and training must not find the
    work done.
    """

    def __init__(self, registry: ScaleRegistry) -> None:
        self._registry = registry
        self._version: tuple[int, bool] | None = None
        self._payload: Float8Tensor | None = None

    def forget(self) -> None:
        """Free the cast."""
        self._version = self._payload = None

    @torch.no_grad()
    def payload(self, weight: Tensor, quantizer: Any) -> Float8Tensor:
        """The weight of this version in FP8, made if need be.

        Args:
            weight: [n, k] in the compute dtype, or gathered in FP8.
            quantizer: TE's, for weights; it records the amax, if this pass records any.
        """
        version = (self._registry.version, self._registry.recording)
        if self._payload is None or self._version != version:
            # A forward pass without gradients reads no transpose.
            columnwise = self._registry.recording
            if isinstance(weight, GatheredInFp8):
                made = _from_gathered(weight, quantizer)
                made.update_usage(columnwise_usage=columnwise or None)
            else:
                internal, quantizer.internal = quantizer.internal, False
                quantizer.set_usage(rowwise=True, columnwise=columnwise)
                made = quantizer.quantize(weight.detach())
                quantizer.internal = internal
            self._payload, self._version = made, version
        return self._payload
