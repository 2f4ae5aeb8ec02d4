"""Cast to FP8, the amax that scales come from, and exact decoding.

    q = round_to_nearest_even(clamp(fp32(x) * scale, -max, max))

The clamp is ours. Bare casts disagree beyond the largest finite value: torch 2.13 on CPU turns
+inf into 448 in E4M3 (an overflow that nobody sees) and makes E5M2 infinite from 61440 up, and
versions differ. NaN stays NaN, -0.0 stays -0.0, +-inf is stored as +-max and shows in the amax.

On CPU, tensors are worked through in chunks that stay in cache: without them a 16 MiB result
takes 1.8 ns per element to decode instead of 0.25, nearly all of it page faults of temporaries.
Numbers are from `bench/quantize.py`, one thread of an AVX-512 CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from megafp8.numerics.formats import Fp8Format

CHUNK = 1 << 18  # elements; 1 MiB of fp32


@dataclass(slots=True)
class QuantizedTensor:
    """FP8 codes and the factor that brings them back: `x ~ data * scale_inv`.

    `scale_inv` (fp32, 0-dim) may be a view into a scale registry: whoever keeps a QuantizedTensor
    beyond the registry's next update has to clone it. With `block` (rows, columns; 0 is all of that
    dimension) it is a grid, of fp32 or E8M0, with one entry for each block of `data` [m, k];
    `power_of_2` then says that all entries are powers of two. `decoded` is None, or the values of
    `data` for products on devices without FP8 units, in bf16 or fp32 (times the grid where that is
    part of the operand; see `gemm`); `data` is not rewritten while it is kept. `transposed` is
    None, or a contiguous copy [k, m] of `data` [m, k], for products on hardware that want one.
    """

    data: Tensor
    scale_inv: Tensor
    format: Fp8Format
    decoded: Tensor | None = field(default=None, repr=False, compare=False)
    block: tuple[int, int] | None = None
    power_of_2: bool = False
    transposed: Tensor | None = field(default=None, repr=False, compare=False)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return `data * scale_inv`, multiplied in fp32 and rounded once to `dtype`."""
        values = decode(self.data, torch.float32)
        if self.block is None:
            return values.mul_(self.scale_inv).to(dtype)
        return scale_blocks_(values, self.scale_inv.float(), self.block).to(dtype)

    def spread_scale_inv(self) -> Tensor:
        """Return scale_inv in fp32, in a form that multiplies elementwise with `data`."""
        if self.block is None:
            return self.scale_inv.float()
        ones = torch.ones(self.data.shape, dtype=torch.float32, device=self.data.device)
        return scale_blocks_(ones, self.scale_inv.float(), self.block)


def whole_block(block: tuple[int, int], shape: torch.Size) -> tuple[int, int]:
    """Return a block with its zeros, "all of this dimension", filled in."""
    return block[0] or max(shape[0], 1), block[1] or max(shape[1], 1)


def scale_blocks_(x: Tensor, grid: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply contiguous x [m, k] in place by a scale for each block, and return it."""
    (rows, columns), (r, c) = x.shape, whole_block(block, x.shape)
    if rows % r == 0 and columns % c == 0:
        # [m, k] seen as [m/r, r, k/c, c]: each scale meets its r x c values without a copy of the
        # grid.
        x.view(rows // r, r, columns // c, c).mul_(grid[:, None, :, None])
        return x
    for dim in (0, 1):  # smaller blocks at an edge
        if block[dim] > 1 and grid.shape[dim] > 1:
            # A dimension with one scale in all broadcasts; the others are repeated, then cut at the
            # edge.
            grid = grid.repeat_interleave(block[dim], dim).narrow(dim, 0, x.shape[dim])
    return x.mul_(grid)


def compute_amax(x: Tensor, drop_nan: bool = False) -> Tensor:
    """Return max |x| as a 0-dim fp32 tensor on x's device, without a host sync.

    Cases: empty -> 0; zeros of either sign -> +0; finite -> exact in fp32 for bf16, fp16 and fp32;
    an inf and no NaN -> inf; any NaN -> NaN, or as if it were 0 with `drop_nan`. Any strides.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    x = x.detach()
    if drop_nan:
        x = torch.nan_to_num(x, nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    # One pass for both ends: x.abs() would write a whole tensor first.
    low, high = torch.aminmax(x)
    # abs: the maximum of +0 and -0 may be -0, and an amax is never negative.
    return torch.maximum(high, -low).abs().float()


def quantize(x: Tensor, scale: Tensor, fmt: Fp8Format) -> Tensor:
    """Cast `x * scale` to FP8, saturating.

    Args:
        x: bf16, fp16 or fp32 of any shape and strides; never written to.
        scale: fp32, 0-dim (or anything that broadcasts against x on a GPU).
        fmt: the target format.

    Returns:
        A contiguous float8 tensor of x's shape. Codes depend on the values alone, not on strides.
    """
    x = x.detach()
    if x.device.type != "cpu" or x.numel() <= CHUNK:
        # A GPU has no use for chunks: one kernel each for scaling, clamping and casting.
        return _scaled(x, scale, fmt).to(fmt.dtype)
    out = torch.empty(x.shape, dtype=fmt.dtype)
    # [chunks of at most CHUNK elements]
    sources = x.contiguous().view(-1).split(CHUNK)
    for source, target in zip(sources, out.view(-1).split(CHUNK), strict=True):
        target.copy_(_scaled(source, scale, fmt))
    return out


def _scaled(x: Tensor, scale: Tensor, fmt: Fp8Format) -> Tensor:
    # A copy even of fp32: the next line writes in place.
    hp = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return hp.mul_(scale).clamp_(-fmt.max, fmt.max)


# Two values as one integer, for tables of pairs.
_PAIRS = {torch.bfloat16: torch.int32, torch.float32: torch.int64}


@cache
def _pair_table(codes: torch.dtype, values: torch.dtype) -> Tensor:
    """Return [65536]: two FP8 codes read as one uint16 -> their two values (256 or 512 KiB)."""
    pairs = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    # [65536] uint16 -> [131072] codes -> as many values -> [65536] pairs of values in one integer.
    return pairs.view(codes).to(values).view(_PAIRS[values])


def decode(data: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values of FP8 codes, without a scale. Exact in bf16, fp16 and fp32.

    torch's own e4m3 -> bf16 cast takes 3.1 ns per element on CPU, a table of single codes 1.0 ns,
    shifting the bits into place 0.27 ns with a check for NaN codes. A table of pairs of codes
    takes 0.23 ns, and is right for subnormals, inf and NaN by construction.
    """
    if data.device.type != "cpu":
        return data.to(dtype)
    codes = data.contiguous().view(torch.uint8).view(-1)  # [numel], bytes
    # A uint16 view needs whole pairs that start at an even byte.
    if codes.numel() % 2 or codes.storage_offset() % 2:
        return data.to(dtype)
    # fp16 is made of bf16, which holds every code exactly, as fp16 does, too.
    made = dtype if dtype in _PAIRS else torch.bfloat16
    values = torch.empty(data.shape, dtype=made)
    table, pairs = _pair_table(data.dtype, made), codes.view(torch.uint16)
    targets = values.view(-1).view(_PAIRS[made]).split(CHUNK)
    for source, target in zip(pairs.split(CHUNK), targets, strict=True):
        _look_up(table, source, target)
    return values.to(dtype)


def _look_up(table: Tensor, pairs: Tensor, out: Tensor) -> None:
    threads = torch.get_num_threads()
    if threads == 1 or pairs.numel() < CHUNK // 4 or pairs.numel() % threads:
        torch.index_select(table, 0, pairs.to(torch.int32), out=out)
        return
    # index_select runs on one thread; gather takes a row per thread, and int64 indices.
    index = pairs.to(torch.int64).view(threads, -1)  # [threads, pairs / threads]
    torch.gather(table.expand(threads, -1), 1, index, out=out.view(threads, -1))
