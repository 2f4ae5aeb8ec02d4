"""One read of a tensor gives its FP8 codes, its amax and the transposed copy of the codes.

The values of `numerics.quantize` and `compute_amax`. Nothing here waits for the device: the scale
is read and the amax written where they live.
"""

# To a type checker a kernel's arguments are what its annotations say; Triton wraps plain values.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafp8.numerics.formats import E4M3, Fp8Format
from megafp8.numerics.kernels.rounding import magnitude_bits, to_codes, to_fp32

BLOCK_M, BLOCK_K = 64, 128
# Fused multiply-adds would round differently from torch's separate operations. With 4 warps these
# tiles take up to 255 registers a thread and spill (SwiGLU's gradient, sm_90), with 8 at most 128.
LAUNCH = {"enable_fp_fusion": False, "num_warps": 8}


@triton.jit
def tile_of(m: tl.tensor, k: tl.tensor, BM: tl.constexpr, BK: tl.constexpr) -> tuple:
    """Return this program's row numbers, column numbers (int64) and what is inside [m, k]."""
    # Programs go along rows of tiles, so that neighbours share cache lines of x.
    across = tl.cdiv(k, BK)
    program = tl.program_id(0)
    # int64: an activation may have more than 2**31 elements.
    rows = (program // across).to(tl.int64) * BM + tl.arange(0, BM)
    cols = (program % across).to(tl.int64) * BK + tl.arange(0, BK)
    return rows, cols, (rows < m)[:, None] & (cols < k)[None, :]


@triton.jit
def put_codes(
    y: tl.tensor,
    scale: tl.tensor,
    codes: tl.tensor,
    transposed: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    inside: tl.tensor,
    m: tl.tensor,
    k: tl.tensor,
    E5M2: tl.constexpr,
    CODES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> None:
    """Scale a tile of fp32 values, cast it and store it once or twice."""
    # Cast once, stored as it lies and transposed: the second copy costs a write, no read.
    q = to_codes(y * scale, E5M2)
    if CODES:
        tl.store(codes + rows[:, None] * k + cols[None, :], q, mask=inside)
    if TRANSPOSED:
        tl.store(transposed + cols[None, :] * m + rows[:, None], q, mask=inside)


@triton.jit
def put_amax(y: tl.tensor, amax: tl.tensor, DROP_NAN: tl.constexpr) -> None:
    """Take the maximum of |y| and what is there; bits of |y| as uint32 let NaN win."""
    if DROP_NAN:
        y = tl.where(y == y, y, 0.0)  # only NaN differs from itself
    # Relaxed: a maximum does not depend on the order in which programs bring theirs.
    tl.atomic_max(amax, tl.max(magnitude_bits(y)), sem="relaxed")


@triton.jit
def _cast_kernel(
    x, scale, codes, transposed, amax, m, k, stride_m, stride_k,
    E5M2: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr, AMAX: tl.constexpr,
    DROP_NAN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = tile_of(m, k, BM, BK)
    at = x + rows[:, None] * stride_m + cols[None, :] * stride_k
    y = to_fp32(tl.load(at, mask=inside, other=0.0))
    if AMAX:
        put_amax(y, amax, DROP_NAN)
    if CODES or TRANSPOSED:
        factor = tl.load(scale)
        put_codes(y, factor, codes, transposed, rows, cols, inside, m, k, E5M2, CODES, TRANSPOSED)


def cast(
    x: Tensor,
    scale: Tensor,
    fmt: Fp8Format,
    *,
    amax: Tensor | None = None,
    drop_nan: bool = False,
    codes: bool = True,
    transposed: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Quantize x [m, k] in one read.

    Args:
        x: bf16, fp16 or fp32, any strides; never written to.
        scale: fp32, 0-dim, on x's device.
        fmt: the target format.
        amax: fp32 0-dim that takes the maximum of itself and max |x| in place. NaN wins, then inf;
            it must not be negative. None: not wanted.
        drop_nan: the amax is that of the values that are not NaN.
        codes: whether codes in x's own order are wanted.
        transposed: whether codes of x^T are wanted.

    Returns:
        (codes [m, k], codes of x^T [k, m]), contiguous; None for what is not wanted. Without any
        element the results are empty and the amax stays.
    """
    assert x.dim() == 2, f"a matrix is expected, found {x.dim()} axes"
    x = x.detach()
    m, k = x.shape
    out, out_t = new_codes(x, m, k, fmt, codes, transposed)
    if x.numel():
        _cast_kernel[(tiles(m, k),)](
            x,
            scale,
            bytes_of(out, scale),
            bytes_of(out_t, scale),
            # A pointer is wanted in any case; with AMAX false no one follows it.
            scale if amax is None else amax.view(torch.uint32),
            m,
            k,
            x.stride(0),
            x.stride(1),
            **constants(fmt, codes, transposed, amax, drop_nan),
        )
    return out, out_t


def record_amax(x: Tensor, amax: Tensor) -> None:
    """Take max |x| into `amax` (see `cast`) in one read, for scales that are found afterwards."""
    # `amax` stands in for a scale that is not read, E4M3 for a format that is not used.
    cast(x.reshape(-1, x.shape[-1]), amax, E4M3, amax=amax, codes=False)


@triton.jit
def _transpose_kernel(codes, out, m, k, BM: tl.constexpr, BK: tl.constexpr):
    rows, cols, inside = tile_of(m, k, BM, BK)
    q = tl.load(codes + rows[:, None] * k + cols[None, :], mask=inside, other=0)
    tl.store(out + cols[None, :] * m + rows[:, None], q, mask=inside)


def transpose_codes(codes: Tensor) -> Tensor:
    """Return a transposed copy [k, m] of contiguous codes [m, k]."""
    m, k = codes.shape
    out = torch.empty(k, m, dtype=codes.dtype, device=codes.device)
    if codes.numel():
        _transpose_kernel[(tiles(m, k),)](
            codes.contiguous().view(torch.uint8),
            out.view(torch.uint8),
            m,
            k,
            BM=BLOCK_M,
            BK=BLOCK_K,
        )
    return out


def tiles(m: int, k: int) -> int:
    """Return how many programs a [m, k] tensor takes."""
    return triton.cdiv(m, BLOCK_M) * triton.cdiv(k, BLOCK_K)


def constants(
    fmt: Fp8Format, codes: bool, transposed: bool, amax: Tensor | None, drop_nan: bool
) -> dict[str, Any]:
    """Return what kernels that cast tiles are compiled for, from the arguments of `cast`."""
    return {
        "E5M2": fmt.name == "e5m2",
        "CODES": codes,
        "TRANSPOSED": transposed,
        "AMAX": amax is not None,
        "DROP_NAN": drop_nan,
        "BM": BLOCK_M,
        "BK": BLOCK_K,
    } | LAUNCH


def new_codes(
    x: Tensor, m: int, k: int, fmt: Fp8Format, codes: bool, transposed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return room for codes [m, k] and transposed codes [k, m] on x's device, where wanted."""
    out = torch.empty(m, k, dtype=fmt.dtype, device=x.device) if codes else None
    out_t = torch.empty(k, m, dtype=fmt.dtype, device=x.device) if transposed else None
    return out, out_t


def bytes_of(codes: Tensor | None, instead: Tensor) -> Tensor:
    """Return codes as bytes; without codes, a pointer that stands in and is not used."""
    return instead if codes is None else codes.view(torch.uint8)
