"""Activation and normalization with the quantization of their result, in one kernel.

Results are rounded to the input's dtype where the separate operations round, and then cast, so
that codes are those of `quantize(operation(x))`. Exponentials and row sums may differ from torch's
in the last bit of fp32, which moves a 16-bit value in about one of 10**5 elements.
"""

# To a type checker a kernel's arguments are what its annotations say; Triton wraps plain values.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.numerics.formats import Fp8Format
from megafp8.numerics.kernels.cast import (
    LAUNCH,
    bytes_of,
    constants,
    new_codes,
    put_amax,
    put_codes,
    tile_of,
    tiles,
)
from megafp8.numerics.kernels.rounding import round_like, to_fp32

ROW_BLOCK = 1024


@triton.jit
def _swiglu_kernel(
    x, scale, codes, transposed, amax, m, k, stride_m,
    E5M2: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr, AMAX: tl.constexpr,
    DROP_NAN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = tile_of(m, k, BM, BK)
    at = x + rows[:, None] * stride_m + cols[None, :]
    gate = to_fp32(tl.load(at, mask=inside, other=0.0))
    up = to_fp32(tl.load(at + k, mask=inside, other=0.0))
    silu = round_like(gate / (1.0 + tl.exp(-gate)), x.dtype.element_ty)
    # Rounded twice, as silu and the product round when they are separate operations.
    y = round_like(silu * up, x.dtype.element_ty)
    if AMAX:
        put_amax(y, amax, DROP_NAN)
    factor = tl.load(scale)
    put_codes(y, factor, codes, transposed, rows, cols, inside, m, k, E5M2, CODES, TRANSPOSED)


@triton.jit
def _dswiglu_kernel(
    grad, x, scale, codes, transposed, amax, m, k, stride_g, stride_m,
    E5M2: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr, AMAX: tl.constexpr,
    DROP_NAN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = tile_of(m, k, BM, BK)
    at = x + rows[:, None] * stride_m + cols[None, :]
    dy = to_fp32(tl.load(grad + rows[:, None] * stride_g + cols[None, :], mask=inside, other=0.0))
    gate = to_fp32(tl.load(at, mask=inside, other=0.0))
    up = to_fp32(tl.load(at + k, mask=inside, other=0.0))
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = round_like(gate / (1.0 + tl.exp(-gate)), x.dtype.element_ty)
    dup = round_like(dy * silu, x.dtype.element_ty)
    dsilu = round_like(dy * up, x.dtype.element_ty)
    # d silu(g)/dg = s (1 + g (1 - s)) with s = sigmoid(g)
    dgate = dsilu * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dgate = round_like(dgate, x.dtype.element_ty)
    if AMAX:
        put_amax(dgate, amax, DROP_NAN)
        put_amax(dup, amax, DROP_NAN)
    factor = tl.load(scale)
    # The gradient is [dgate, dup] [m, 2k]: both halves go into one tensor with one scale.
    whole = 2 * k
    put_codes(
        dgate, factor, codes, transposed, rows, cols, inside, m, whole, E5M2, CODES, TRANSPOSED
    )
    put_codes(
        dup, factor, codes, transposed, rows, cols + k, inside, m, whole, E5M2, CODES, TRANSPOSED
    )


@triton.jit
def _row_statistics_kernel(
    x, mean, rstd, k, stride_m, epsilon, CENTERED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = x + row * stride_m
    center = 0.0
    if CENTERED:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, k, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            total += to_fp32(tl.load(at + cols, mask=cols < k, other=0.0))
        center = tl.sum(total) / k
        tl.store(mean + row, center)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, k, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        y = to_fp32(tl.load(at + cols, mask=cols < k, other=0.0)) - center
        y = tl.where(cols < k, y, 0.0)  # beyond the row 0 - center is not 0
        squares += y * y
    # The biased variance, as LayerNorm and RMSNorm have it.
    tl.store(rstd + row, 1.0 / tl.sqrt(tl.sum(squares) / k + epsilon))


@triton.jit
def _normalize_kernel(
    x, weight, bias, mean, rstd, scale, codes, transposed, amax, m, k, stride_m,
    CENTERED: tl.constexpr, E5M2: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr,
    AMAX: tl.constexpr, DROP_NAN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = tile_of(m, k, BM, BK)
    at = x + rows[:, None] * stride_m + cols[None, :]
    y = to_fp32(tl.load(at, mask=inside, other=0.0))
    w = to_fp32(tl.load(weight + cols, mask=cols < k, other=0.0))
    inverse = tl.load(rstd + rows, mask=rows < m, other=0.0)
    if CENTERED:
        y = y - tl.load(mean + rows, mask=rows < m, other=0.0)[:, None]
        b = to_fp32(tl.load(bias + cols, mask=cols < k, other=0.0))
        y = y * inverse[:, None] * w[None, :] + b[None, :]
    else:
        y = y * inverse[:, None] * w[None, :]
    # A bias would leave something outside of [m, k], which must not reach the amax.
    y = tl.where(inside, round_like(y, x.dtype.element_ty), 0.0)
    if AMAX:
        put_amax(y, amax, DROP_NAN)
    factor = tl.load(scale)
    put_codes(y, factor, codes, transposed, rows, cols, inside, m, k, E5M2, CODES, TRANSPOSED)


def swiglu_cast(
    x: Tensor,
    scale: Tensor,
    fmt: Fp8Format,
    *,
    amax: Tensor | None = None,
    drop_nan: bool = False,
    codes: bool = True,
    transposed: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Quantize silu(gate) * up for x = [gate, up] [m, 2k] -> [m, k]; otherwise as `cast`."""
    x = _rows(x)
    m, k = x.shape[0], x.shape[1] // 2
    out, out_t = new_codes(x, m, k, fmt, codes, transposed)
    if m * k:
        _swiglu_kernel[(tiles(m, k),)](
            x,
            scale,
            bytes_of(out, scale),
            bytes_of(out_t, scale),
            scale if amax is None else amax.view(torch.uint32),
            m,
            k,
            x.stride(0),
            **constants(fmt, codes, transposed, amax, drop_nan),
        )
    return out, out_t


def swiglu_backward_cast(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    fmt: Fp8Format,
    *,
    amax: Tensor | None = None,
    drop_nan: bool = False,
    codes: bool = True,
    transposed: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Quantize the gradient of SwiGLU's input.

    Args:
        grad: [m, k], of SwiGLU's result.
        x: [m, 2k], what SwiGLU read.
        scale: see `cast`.
        fmt: see `cast`.
        amax: see `cast`.
        drop_nan: see `cast`.
        codes: see `cast`.
        transposed: see `cast`.

    Returns:
        (codes [m, 2k], transposed codes [2k, m]) as `cast`.
    """
    grad, x = _rows(grad), _rows(x)
    m, k = grad.shape
    assert x.shape == (m, 2 * k), f"gradient {tuple(grad.shape)} of {tuple(x.shape)}"
    out, out_t = new_codes(x, m, 2 * k, fmt, codes, transposed)
    if m * k:
        _dswiglu_kernel[(tiles(m, k),)](
            grad,
            x,
            scale,
            bytes_of(out, scale),
            bytes_of(out_t, scale),
            scale if amax is None else amax.view(torch.uint32),
            m,
            k,
            grad.stride(0),
            x.stride(0),
            **constants(fmt, codes, transposed, amax, drop_nan),
        )
    return out, out_t


def norm_cast(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    epsilon: float,
    scale: Tensor,
    fmt: Fp8Format,
    *,
    amax: Tensor | None = None,
    drop_nan: bool = False,
    codes: bool = True,
    transposed: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Quantize RMSNorm (no bias) or LayerNorm (with one) of the rows of x [m, k].

    Two kernels: statistics of rows read x once, the cast reads it once more. Neither writes the
    normalized tensor in 16 bits.

    Returns:
        (codes, transposed codes, mean fp32 [m] or None, 1 / standard deviation fp32 [m]).
    """
    x = _rows(x)
    m, k = x.shape
    out, out_t = new_codes(x, m, k, fmt, codes, transposed)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    mean = None if bias is None else torch.empty_like(rstd)
    if m * k:
        centered, block = bias is not None, min(ROW_BLOCK, triton.next_power_of_2(k))
        first = rstd if mean is None else mean
        _row_statistics_kernel[(m,)](
            x, first, rstd, k, x.stride(0), epsilon, CENTERED=centered, BLOCK=block, **LAUNCH
        )
        _normalize_kernel[(tiles(m, k),)](
            x,
            weight,
            weight if bias is None else bias,
            first,
            rstd,
            scale,
            bytes_of(out, scale),
            bytes_of(out_t, scale),
            scale if amax is None else amax.view(torch.uint32),
            m,
            k,
            x.stride(0),
            CENTERED=centered,
            **constants(fmt, codes, transposed, amax, drop_nan),
        )
    return out, out_t, mean, rstd


def _rows(x: Tensor) -> Tensor:
    """Return x as a matrix whose rows are contiguous."""
    x = x.detach().reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
