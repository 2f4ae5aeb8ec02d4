"""Current scaling: casts whose scales come from the tensor itself, by tensor, row or block.

A block (r, c) is r x c neighbouring elements of a matrix that share a scale, 0 standing for all of
that dimension; scales form a grid [ceil(m/r), ceil(k/c)]. Blocks at an edge may be smaller.

    recipe      x for fprop, dy for dgrad   x, dy for wgrad   w for fprop   w for dgrad
    tensorwise  one scale                   the same codes    one scale     the same codes
    rowwise     (1, 0)                      (0, 1)            (1, 0)        (0, 1)
    blockwise   (1, 128)                    (128, 1)          (128, 128)    the same codes
    mxfp8       (1, 32)                     (32, 1)           (1, 32)       (32, 1)

Each is cast from high precision: a scale has to be constant along what a GEMM does not sum over
(rowwise), or along pieces of what it sums over, so the codes for one direction are no good for
the other. Square blocks and single scales are the same seen from both sides.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.config.recipes import Block
from megafp8.numerics.formats import Fp8Format
from megafp8.numerics.quantize import CHUNK, QuantizedTensor, quantize, scale_blocks_, whole_block
from megafp8.numerics.recipe import Recipe
from megafp8.numerics.scales import current_scale, e8m0_codes, e8m0_scales


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Return max |x| of each block of x [m, k] as an fp32 grid, without a host sync.

    Cases as in `compute_amax`: zeros of either sign -> +0, an inf -> inf, any NaN -> NaN. Zeros
    fill smaller blocks at the edges, which raises no amax.
    """
    blocks = _as_blocks(x.detach().abs(), whole_block(block, x.shape))
    whole = [not size for size in block]
    if blocks.numel() == 0:
        # "All of a dimension" is one block, of an empty one too.
        grid = [1 if all_of else n for all_of, n in zip(whole, blocks.shape[::2], strict=True)]
        return torch.zeros(grid, dtype=torch.float32, device=x.device)
    # One dim at a time: torch reduces two at once without vector instructions on CPU (2.13).
    # [m/r, r, k/c, c] -> [m/r, k/c, c] -> [m/r, k/c]
    return blocks.amax(1).amax(2).float()


def quantize_tensor(x: Tensor, fmt: Fp8Format, amax: Tensor, power_of_2: bool) -> QuantizedTensor:
    """Cast x with one scale for `amax`, 0-dim fp32: its own, or the maximum over several ranks."""
    scale = current_scale(amax, fmt, power_of_2=power_of_2)
    return QuantizedTensor(quantize(x, scale, fmt), scale.reciprocal(), fmt)


def quantize_blocks(
    x: Tensor, block: Block, fmt: Fp8Format, recipe: Recipe
) -> tuple[QuantizedTensor, Tensor]:
    """Cast x [m, k] with a scale for each block.

    Args:
        x: bf16, fp16 or fp32, any strides; never written to.
        block: (rows, columns) that share a scale.
        fmt: the target format.
        recipe: which rule turns an amax into a scale.

    Returns:
        The codes [m, k] with scale_inv as a grid (fp32; E8M0 for mxfp8), and the amax of x, 0-dim.
    """
    if x.device.type == "cpu":
        # A view is not enough: the passes below want unit strides. bf16 is exact in fp32.
        x = x.detach().to(torch.float32, memory_format=torch.contiguous_format)
    amax = block_amax(x, block)
    if recipe.spec.e8m0:
        # The byte is what the GEMM reads; the factor is its exact inverse, so both agree to the
        # bit.
        codes = e8m0_codes(amax, fmt)
        scale, scale_inv = e8m0_scales(codes), codes.view(torch.float8_e8m0fnu)
    else:
        scale = current_scale(amax, fmt, power_of_2=recipe.power_of_2_scales)
        scale_inv = scale.reciprocal()
    data = _cast(x, scale, block, fmt)
    exact = recipe.power_of_2_scales
    largest = amax.amax() if amax.numel() else amax.new_zeros(())
    return QuantizedTensor(data, scale_inv, fmt, block=block, power_of_2=exact), largest


def _as_blocks(x: Tensor, block: Block) -> Tensor:
    """[m, k] -> [m/r, r, k/c, c], padded with zeros; a view if nothing is padded."""
    (rows, columns), (r, c) = x.shape, block
    pad_rows, pad_columns = -rows % r, -columns % c  # zeros: they raise no amax
    if pad_rows or pad_columns:
        x = F.pad(x, (0, pad_columns, 0, pad_rows))
    return x.reshape(x.shape[0] // r, r, x.shape[1] // c, c)


def _cast(x: Tensor, scale: Tensor, block: Block, fmt: Fp8Format) -> Tensor:
    rows, columns = x.shape
    if x.device.type != "cpu" or rows * columns <= CHUNK:
        return _scaled(x, scale, block).clamp_(-fmt.max, fmt.max).to(fmt.dtype)
    out = torch.empty(x.shape, dtype=fmt.dtype)
    # Chunks of whole blocks; where a block has all rows, every chunk takes the one row of scales.
    block = whole_block(block, x.shape)
    r, step = block[0], max(CHUNK // columns, 1)
    # A chunk that cut a block would need two chunks' values for one scale.
    step = max(step // r, 1) * r if scale.shape[0] > 1 else step
    for start in range(0, rows, step):
        part = x[start : start + step]
        if scale.shape[0] > 1:
            grid, shape = scale[start // r : -(-(start + len(part)) // r)], block
        else:
            grid, shape = scale, (1, block[1])
        hp = _scaled(part, grid.expand(-(-len(part) // shape[0]), -1), shape)
        out[start : start + step].copy_(hp.clamp_(-fmt.max, fmt.max))
    return out


def _scaled(x: Tensor, scale: Tensor, block: Block) -> Tensor:
    """X * scale in fp32, as a new tensor."""
    hp = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    return scale_blocks_(hp, scale, block)
