"""Casts with a scale for each row, each column, or both: two reads of a tensor, whatever is wanted.

The first read finds the largest magnitude of each row and column, the second casts: codes as the
tensor lies with its rows' scales, transposed codes with its columns'. Values are those of
`numerics.granular` with blocks (1, 0) and (0, 1).
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
from megafp8.numerics.kernels.blocks import scale_of
from megafp8.numerics.kernels.cast import (
    BLOCK_K,
    BLOCK_M,
    LAUNCH,
    bytes_of,
    new_codes,
    tile_of,
    tiles,
)
from megafp8.numerics.kernels.rounding import magnitude_bits, to_codes, to_fp32
from megafp8.numerics.quantize import QuantizedTensor


@triton.jit
def _amax_kernel(
    x, row_amax, column_amax, m, k, stride_m, stride_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = tile_of(m, k, BM, BK)
    at = x + rows[:, None] * stride_m + cols[None, :] * stride_k
    bits = magnitude_bits(to_fp32(tl.load(at, mask=inside, other=0.0)))
    if ROWS:
        # Several programs share a row: the first read must end before any cast begins, hence two
        # kernels.
        tl.atomic_max(row_amax + rows, tl.max(bits, 1), mask=rows < m, sem="relaxed")
    if COLUMNS:
        tl.atomic_max(column_amax + cols, tl.max(bits, 0), mask=cols < k, sem="relaxed")


@triton.jit
def _rows_kernel(
    x, row_amax, column_amax, codes, transposed, row_inverse, column_inverse, m, k,
    stride_m, stride_k, E5M2: tl.constexpr, POWER_OF_2: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = tile_of(m, k, BM, BK)
    at = x + rows[:, None] * stride_m + cols[None, :] * stride_k
    y = to_fp32(tl.load(at, mask=inside, other=0.0))
    across = tl.cdiv(k, BK)
    FP8_MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    if ROWS:
        bits = tl.load(row_amax + rows, mask=rows < m, other=0)
        scale, inverse = scale_of(bits, FP8_MAX, POWER_OF_2)
        if tl.program_id(0) % across == 0:  # one program of a row stores its scale
            tl.store(row_inverse + rows, inverse, mask=rows < m)
        q = to_codes(y * scale[:, None], E5M2)
        tl.store(codes + rows[:, None] * k + cols[None, :], q, mask=inside)
    if COLUMNS:
        bits = tl.load(column_amax + cols, mask=cols < k, other=0)
        scale, inverse = scale_of(bits, FP8_MAX, POWER_OF_2)
        if tl.program_id(0) < across:
            tl.store(column_inverse + cols, inverse, mask=cols < k)
        q = to_codes(y * scale[None, :], E5M2)
        tl.store(transposed + cols[None, :] * m + rows[:, None], q, mask=inside)


def cast_rows(
    x: Tensor, fmt: Fp8Format, *, power_of_2: bool, rows: bool = True, columns: bool = True
) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Tensor]:
    """Quantize x [m, k] with a scale for each row, and again with one for each column.

    Args:
        x: bf16, fp16 or fp32, any strides, not empty; never written to.
        fmt: the target format.
        power_of_2: whether scales are powers of two.
        rows: whether codes with rows' scales are wanted.
        columns: whether codes with columns' scales are wanted; they are stored transposed, and
            `data` is a view of that copy.

    Returns:
        (the operand with a grid [m, 1], the one with a grid [1, k], the amax of x); None for what
        is not wanted.
    """
    assert x.dim() == 2 and x.numel(), f"a matrix with elements is expected, found {x.shape}"
    assert rows or columns, "neither rows nor columns are wanted"
    x, (m, k) = x.detach(), x.shape
    amax = torch.zeros(m + k, dtype=torch.float32, device=x.device)
    # Apart: cuBLAS wants scales to start at multiples of 16 bytes, and only one of them is kept.
    row_inverse, column_inverse = (amax.new_empty(n) for n in (m, k))
    out, out_t = new_codes(x, m, k, fmt, rows, columns)
    row_bits, column_bits = amax.view(torch.uint32).split((m, k))
    grid, wanted = (tiles(m, k),), {"ROWS": rows, "COLUMNS": columns}
    shape = (m, k, x.stride(0), x.stride(1))
    _amax_kernel[grid](x, row_bits, column_bits, *shape, **wanted, BM=BLOCK_M, BK=BLOCK_K, **LAUNCH)
    _rows_kernel[grid](
        x,
        row_bits,
        column_bits,
        bytes_of(out, amax),
        bytes_of(out_t, amax),
        row_inverse,
        column_inverse,
        *shape,
        E5M2=fmt.name == "e5m2",
        POWER_OF_2=power_of_2,
        **wanted,
        BM=BLOCK_M,
        BK=BLOCK_K,
        **LAUNCH,
    )
    by_row, by_column = None, None
    if out is not None:
        by_row = QuantizedTensor(
            out, row_inverse.view(m, 1), fmt, block=(1, 0), power_of_2=power_of_2
        )
    if out_t is not None:
        by_column = QuantizedTensor(
            out_t.t(),
            column_inverse.view(1, k),
            fmt,
            block=(0, 1),
            power_of_2=power_of_2,
            transposed=out_t,
        )
    return by_row, by_column, amax.amax()
