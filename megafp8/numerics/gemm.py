"""The three products of a linear layer on FP8 operands.

Letters: m tokens, k in features, n out features. Data are codes, each with its scale_inv.

    fprop  y  [m, n] = x  [m, k] @ w  [n, k]^T     E4M3 x E4M3   fast accumulation (blocks: split)
    dgrad  dx [m, k] = dy [m, n] @ w  [n, k]       E5M2 x E4M3   split accumulation
    wgrad  dw [n, k] = dy [m, n]^T @ x [m, k]      E5M2 x E4M3   split accumulation

With one scale a tensor dy is cast once and feeds both backward products; other recipes cast for
each direction (`granular`). On CUDA with FP8 units `torch._scaled_mm` wants its first operand
row-major and its second column-major: fprop needs no copy, dgrad one transposed copy of w, wgrad
one of each operand, unless an operand brings its own (`hardware`). Elsewhere the codes are decoded
(exact) to bf16, or to fp32 where a CPU multiplies that faster (`products`), and summed in fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafp8.config.recipes import GEMM_MULTIPLE
from megafp8.errors import PrecisionError
from megafp8.numerics.device_gemm import native, native_mm
from megafp8.numerics.products import product_dtype
from megafp8.numerics.quantize import QuantizedTensor, decode, scale_blocks_


def check_gemm_dims(
    tokens: int, in_features: int, out_features: int, *, name: str = "FP8 GEMM"
) -> None:
    """Refuse dimensions that an FP8 GEMM cannot take.

    Args:
        tokens: m, as the GEMM sees it (after a sequence-parallel gather).
        in_features: k of this rank.
        out_features: n of this rank.
        name: the layer, for the message.

    Raises:
        PrecisionError: naming the layer, the dimension, what was found and the multiple required.
    """
    if not (tokens | in_features | out_features) % GEMM_MULTIPLE:  # a power of two
        return
    dimensions = {"tokens": tokens, "in_features": in_features, "out_features": out_features}
    for dimension, found in dimensions.items():
        if found % GEMM_MULTIPLE:
            raise PrecisionError(
                f"{name}: {dimension} {found} is not a multiple of {GEMM_MULTIPLE}"
            )


def fprop(
    x: QuantizedTensor, w: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return y [m, n] = x [m, k] @ w [n, k]^T, scaled."""
    check_gemm_dims(x.data.shape[0], x.data.shape[1], w.data.shape[0], name="fprop")
    if native(x, w):
        # Fast accumulation keeps fewer bits of partial sums: enough for activations, not for
        # gradients.
        return native_mm(x, False, w, True, out_dtype, fast=True)
    (a, left), (b, right) = _operand(x, 1, out_dtype), _operand(w, 1, out_dtype)
    # [m, k] @ [k, n]; what is left of the scales multiplies rows and columns of the product.
    return _decoded_mm(a, b.t(), left, right, out_dtype)


def dgrad(
    dy: QuantizedTensor, w: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return dx [m, k] = dy [m, n] @ w [n, k], scaled."""
    check_gemm_dims(dy.data.shape[0], w.data.shape[1], w.data.shape[0], name="dgrad")
    if native(dy, w):
        return native_mm(dy, False, w, False, out_dtype, fast=False)
    if dy.decoded is None and dy.block is None:
        dy.decoded = _decode(dy)  # wgrad follows, decodes the same codes and takes this away
    # dgrad sums over n: columns of dy, rows of w.
    (a, left), (b, right) = _operand(dy, 1, out_dtype), _operand(w, 0, out_dtype)
    return _decoded_mm(a, b, left, right, out_dtype)


def wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return dw [n, k] = dy [m, n]^T @ x [m, k], scaled."""
    check_gemm_dims(dy.data.shape[0], x.data.shape[1], dy.data.shape[1], name="wgrad")
    if native(dy, x):
        return native_mm(dy, True, x, False, out_dtype, fast=False)
    # wgrad sums over tokens: rows of both.
    (a, left), (b, right) = _operand(dy, 0, out_dtype), _operand(x, 0, out_dtype)
    # The last product of this gradient: its decoded copy, twice its size, goes.
    dy.decoded = None
    return _decoded_mm(a.t(), b, left, right, out_dtype)


def keep_decoded(operand: QuantizedTensor) -> None:
    """Decode once for several products: for a weight that is used by many micro-batches.

    Nothing to do where FP8 is multiplied natively. `operand.data` must not be rewritten after.
    """
    if operand.decoded is None and not native(operand, operand):
        operand.decoded = _decode(operand)


def _decode(operand: QuantizedTensor) -> Tensor:
    """The operand's values, with its scales where they vary along what is summed over.

    Powers of two go into bf16 values exactly (above 2**-133, bf16's smallest number): products are
    then rounded once, after a sum in fp32, as hardware that scales its partial sums does it. Other
    factors would round a bf16 value; with them the operand is fp32.
    """
    dtype = product_dtype(torch.bfloat16, operand.data.device)
    values = decode(operand.data, dtype)
    # Scales that are constant along the sum come out of it: they multiply the product instead.
    if operand.block is None or _is_factor(operand):
        return values
    dtype = dtype if operand.power_of_2 else torch.float32
    return scale_blocks_(values.to(dtype), operand.scale_inv.to(dtype), operand.block)


def _is_factor(operand: QuantizedTensor) -> bool:
    """Whether the scales are one a row, or one in all, and no powers of two: they come last."""
    block = operand.block
    return block is None or (0 in block and not operand.power_of_2)


def _operand(
    operand: QuantizedTensor, summed: int, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The values of an operand, and what is left to multiply the product with.

    Args:
        operand: of a GEMM.
        summed: the dimension that the GEMM sums over.
        out_dtype: an fp32 result comes from fp32 operands: a bf16 product would round it to 8 bits.
    """
    values = _decode(operand) if operand.decoded is None else operand.decoded
    factor = operand.scale_inv if _is_factor(operand) else None
    if factor is not None and operand.block is not None:
        assert factor.shape[summed] == 1, "a scale for each row of what is not summed over"
        # [m, 1] or [1, n] -> one entry for each row or column of the product
        factor = factor.flatten()
    return (values.float() if out_dtype == torch.float32 else values), factor


def _decoded_mm(
    a: Tensor, b: Tensor, left: Tensor | None, right: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """A [m, k] @ b [k, n], times a factor (0-dim, [m] or [n]) on each side."""
    # One operand may carry its scales in fp32 while the other is plain bf16 codes.
    if a.dtype != b.dtype:
        a, b = a.float(), b.float()
    factors = [factor for factor in (left, right) if factor is not None]
    if not factors:
        return torch.mm(a, b).to(out_dtype)
    if a.device.type == "cpu" and all(factor.dim() == 0 for factor in factors):
        # alpha multiplies the fp32 accumulator: one rounding, and nothing to pay for the scaling
        # (a pass over y costs 0.11 ns per element). Reading a scalar is no sync on a CPU.
        alpha = math.prod(float(factor) for factor in factors)
        return a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=alpha).to(out_dtype)
    # bf16 rounds once before scaling and once after; alpha would need the scale on the host.
    y = torch.mm(a, b).float()
    if left is not None:
        y.mul_(left[:, None] if left.dim() else left)
    return (y if right is None else y.mul_(right)).to(out_dtype)
