"""Casts with a scale for each block, in one read: amaxes, scales and codes of `numerics.granular`.

Blocks are 1x128, 128x1, 128x128 (blockwise) and 1x32, 32x1 (mxfp8). Every program handles whole
blocks, so a scale is known as soon as its block has been read.
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
from megafp8.numerics.kernels.cast import LAUNCH, bytes_of, new_codes, tile_of
from megafp8.numerics.kernels.rounding import magnitude_bits, to_codes, to_fp32
from megafp8.numerics.quantize import QuantizedTensor

# (rows, columns) of a block -> (rows, columns) of a program's tile.
TILES = {(1, 128): (32, 128), (1, 32): (32, 128), (128, 1): (128, 32), (32, 1): (128, 32)}
TILES[(128, 128)] = (128, 128)


@triton.jit
def scale_of(bits: tl.tensor, FP8_MAX: tl.constexpr, POWER_OF_2: tl.constexpr) -> tuple:
    """(scale, scale_inv) of amaxes, given as bits: `scales.current_scale`."""
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.full(amax.shape, FP8_MAX, tl.float32), amax)
    scale = tl.minimum(scale, 3.4028234663852886e38)
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    if POWER_OF_2:
        scale = (scale.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where((bits > 0) & (bits < 0x7F800000), scale, 1.0)
    return scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _e8m0_of(bits: tl.tensor, FP8_MAX_BITS: tl.constexpr) -> tuple:
    """(scale, byte of scale_inv) of amaxes, given as bits: `scales.e8m0_codes`, `e8m0_scales`."""
    exponent = (bits >> 23).to(tl.int32) - (FP8_MAX_BITS >> 23)
    exponent += ((bits & 0x7FFFFF) > (FP8_MAX_BITS & 0x7FFFFF)).to(tl.int32)
    byte = tl.minimum(tl.maximum(exponent + 127, 0), 254)
    byte = tl.where(bits >= 0x7F800000, tl.where(bits > 0x7F800000, 255, 254), byte)
    inverse = 254 - byte
    scale_bits = tl.where(inverse > 0, inverse << 23, 1 << 22)
    scale_bits = tl.where(byte == 255, 0x7FC00000, scale_bits)
    return scale_bits.to(tl.float32, bitcast=True), byte.to(tl.uint8)


@triton.jit
def _block_kernel(
    x, codes, transposed, grid, amax, m, k, stride_m, stride_k, grid_columns,
    R: tl.constexpr, C: tl.constexpr, E5M2: tl.constexpr, MX: tl.constexpr,
    POWER_OF_2: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = tile_of(m, k, BM, BK)
    y = to_fp32(
        tl.load(x + rows[:, None] * stride_m + cols[None, :] * stride_k, mask=inside, other=0.0)
    )
    # [BM/R, R, BK/C, C]; tiles are whole blocks, so no block has two programs.
    blocks = tl.reshape(magnitude_bits(y), (BM // R, R, BK // C, C))
    bits = tl.max(tl.max(blocks, 3), 1)
    tl.atomic_max(amax, tl.max(bits), sem="relaxed")
    FP8_MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    if MX:
        scale, inverse = _e8m0_of(bits, 0x47600000 if E5M2 else 0x43E00000)
    else:
        scale, inverse = scale_of(bits, FP8_MAX, POWER_OF_2)
    across = tl.cdiv(k, BK)
    block_rows = (tl.program_id(0) // across) * (BM // R) + tl.arange(0, BM // R)
    block_cols = (tl.program_id(0) % across) * (BK // C) + tl.arange(0, BK // C)
    # The grid ends where the last block begins inside of the tensor.
    there = (block_rows * R < m)[:, None] & (block_cols * C < k)[None, :]
    at = grid + block_rows[:, None].to(tl.int64) * grid_columns + block_cols[None, :]
    tl.store(at, inverse, mask=there)
    # Each block's scale to its R x C elements, back in the order of the tile.
    spread = tl.broadcast_to(tl.reshape(scale, (BM // R, 1, BK // C, 1)), (BM // R, R, BK // C, C))
    q = to_codes(y * tl.reshape(spread, (BM, BK)), E5M2)
    if CODES:
        tl.store(codes + rows[:, None] * k + cols[None, :], q, mask=inside)
    if TRANSPOSED:
        tl.store(transposed + cols[None, :] * m + rows[:, None], q, mask=inside)


def cast_blocks(
    x: Tensor,
    block: tuple[int, int],
    fmt: Fp8Format,
    *,
    mx: bool,
    power_of_2: bool,
    transposed: bool = False,
) -> tuple[QuantizedTensor, Tensor]:
    """Quantize x [m, k] with a scale for each block.

    Args:
        x: bf16, fp16 or fp32, any strides, not empty; never written to.
        block: (rows, columns) that share a scale, one of `TILES`.
        fmt: the target format.
        mx: scales are E8M0 bytes, else fp32.
        power_of_2: whether scales are powers of two.
        transposed: store codes as [k, m]; `data` is then a view of that copy.

    Returns:
        What `granular.quantize_blocks` returns: the operand, and the amax of x, 0-dim.
    """
    assert x.dim() == 2 and x.numel(), f"a matrix with elements is expected, found {x.shape}"
    (m, k), (r, c), (bm, bk) = x.shape, block, TILES[block]
    out, out_t = new_codes(x, m, k, fmt, not transposed, transposed)
    dtype = torch.uint8 if mx else torch.float32
    grid = torch.empty(triton.cdiv(m, r), triton.cdiv(k, c), dtype=dtype, device=x.device)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    _block_kernel[(triton.cdiv(m, bm) * triton.cdiv(k, bk),)](
        x.detach(),
        bytes_of(out, amax),
        bytes_of(out_t, amax),
        grid,
        amax.view(torch.uint32),
        m,
        k,
        x.stride(0),
        x.stride(1),
        grid.shape[1],
        R=r,
        C=c,
        E5M2=fmt.name == "e5m2",
        MX=mx,
        POWER_OF_2=power_of_2,
        CODES=not transposed,
        TRANSPOSED=transposed,
        BM=bm,
        BK=bk,
        **LAUNCH,
    )
    data = out if out is not None else out_t
    assert data is not None
    operand = QuantizedTensor(
        data if out is not None else data.t(),
        grid.view(torch.float8_e8m0fnu) if mx else grid,
        fmt,
        block=block,
        power_of_2=power_of_2,
        transposed=out_t,
    )
    return operand, amax
