"""The three products of a linear layer on FP8 operands.

Letters: m tokens, k in features, n out features. Data are codes, each with its scale_inv.

    fprop  y  [m, n] = x  [m, k] @ w  [n, k]^T     E4M3 x E4M3   fast accumulation
    dgrad  dx [m, k] = dy [m, n] @ w  [n, k]       E5M2 x E4M3   split accumulation
    wgrad  dw [n, k] = dy [m, n]^T @ x [m, k]      E5M2 x E4M3   split accumulation

dy is cast once and feeds both backward products. On CUDA with FP8 units `torch._scaled_mm` wants
its first operand row-major and its second column-major: fprop needs no copy, dgrad one transposed
copy of w, wgrad one of each operand; an operand that brings its own (`transposed`) is not copied
again. Elsewhere the codes are decoded to bf16 (exact) and multiplied
with fp32 accumulation.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from megafp8.errors import PrecisionError
from megafp8.numerics.quantize import QuantizedTensor, decode

# cuBLASLt's FP8 kernels take dimensions in multiples of 16. The rule holds on every device, so
# that a configuration that runs on a CPU also runs on a GPU.
DIMENSION_MULTIPLE = 16


def fp8_hardware(device: torch.device | str) -> tuple[bool, str]:
    """Say whether `device` multiplies FP8 natively, with the reason."""
    device = torch.device(device)
    if device.type != "cuda":
        return False, f"{device.type} has no FP8 matrix units"
    if torch.version.hip is not None:
        return False, "ROCm is not supported: its FP8 formats and layouts differ"
    if not torch.cuda.is_available():
        return False, "no CUDA device is available"
    major, minor = torch.cuda.get_device_capability(device)
    found = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
    if (major, minor) < (8, 9):
        return False, f"{found}; FP8 matrix units need 8.9"
    return True, found


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
    if not (tokens | in_features | out_features) % DIMENSION_MULTIPLE:  # a power of two
        return
    dimensions = {"tokens": tokens, "in_features": in_features, "out_features": out_features}
    for dimension, found in dimensions.items():
        if found % DIMENSION_MULTIPLE:
            raise PrecisionError(
                f"{name}: {dimension} {found} is not a multiple of {DIMENSION_MULTIPLE}"
            )


def fprop(
    x: QuantizedTensor, w: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return y [m, n] = x [m, k] @ w [n, k]^T, scaled."""
    check_gemm_dims(x.data.shape[0], x.data.shape[1], w.data.shape[0], name="fprop")
    if _native(x.data.device):
        return _scaled_mm(x.data, w.data.t(), x, w, out_dtype, fast=True)
    return _decoded_mm(_decode(x, out_dtype), _decode(w, out_dtype).t(), x, w)


def dgrad(
    dy: QuantizedTensor, w: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return dx [m, k] = dy [m, n] @ w [n, k], scaled."""
    check_gemm_dims(dy.data.shape[0], w.data.shape[1], w.data.shape[0], name="dgrad")
    if _native(dy.data.device):
        return _scaled_mm(dy.data, _columns(w).t(), dy, w, out_dtype, fast=False)
    if dy.decoded is None:  # wgrad follows, decodes the same codes and takes this away
        dy.decoded = decode(dy.data)
    return _decoded_mm(_decode(dy, out_dtype), _decode(w, out_dtype), dy, w)


def wgrad(
    dy: QuantizedTensor, x: QuantizedTensor, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return dw [n, k] = dy [m, n]^T @ x [m, k], scaled."""
    check_gemm_dims(dy.data.shape[0], x.data.shape[1], dy.data.shape[1], name="wgrad")
    if _native(dy.data.device):
        return _scaled_mm(_columns(dy), _columns(x).t(), dy, x, out_dtype, fast=False)
    dy_values, dy.decoded = _decode(dy, out_dtype), None
    return _decoded_mm(dy_values.t(), _decode(x, out_dtype), dy, x)


def keep_decoded(operand: QuantizedTensor) -> None:
    """Decode once for several products: for a weight that is used by many micro-batches.

    Nothing to do where FP8 is multiplied natively. `operand.data` must not be rewritten after.
    """
    if operand.decoded is None and not _native(operand.data.device):
        operand.decoded = decode(operand.data)


@cache
def _native(device: torch.device) -> bool:
    return device.type == "cuda" and fp8_hardware(device)[0]


def _decode(operand: QuantizedTensor, out_dtype: torch.dtype) -> Tensor:
    # An fp32 result comes from fp32 operands: the bf16 product would round it to 8 bits.
    values = decode(operand.data) if operand.decoded is None else operand.decoded
    return values.float() if out_dtype == torch.float32 else values


def _columns(operand: QuantizedTensor) -> Tensor:
    """Return the codes [m, k] as a contiguous [k, m]: the copy that is there, else a new one."""
    if operand.transposed is not None:
        return operand.transposed
    return operand.data.t().contiguous()


def _scaled_mm(
    a: Tensor, b: Tensor, qa: QuantizedTensor, qb: QuantizedTensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        a,
        b,
        scale_a=qa.scale_inv,
        scale_b=qb.scale_inv,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def _decoded_mm(a: Tensor, b: Tensor, qa: QuantizedTensor, qb: QuantizedTensor) -> Tensor:
    if a.device.type == "cpu":
        # alpha multiplies the fp32 accumulator: one rounding, and nothing to pay for the scaling
        # (a pass over y costs 0.11 ns per element). Reading a scalar is no sync on a CPU.
        alpha = float(qa.scale_inv) * float(qb.scale_inv)
        return a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=alpha)
    # Rounds once before scaling and once after; alpha would need the scale on the host.
    return torch.mm(a, b).float().mul_(qa.scale_inv).mul_(qb.scale_inv).to(a.dtype)
