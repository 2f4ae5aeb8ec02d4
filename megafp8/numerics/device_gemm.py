"""What a device multiplies in FP8 itself, and the calls that do it.

`torch._scaled_mm` and `torch.nn.functional.scaled_mm` want their first operand row-major [m, k] and
their second column-major [k, n]. Layouts of block scales as torch 2.13 checks them
(`_meta_registrations.py`), with L4 = k/128 rounded up to a multiple of 4:

    1x128     [m, k/128] with strides [1, m]
    128x128   [L4, n/128] with strides [1, L4]
    1x32      E8M0, padded to [128 i, 4 j] and swizzled in tiles of 128 x 4
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.config.recipes import FP8_UNITS, RECIPES, Block, MatrixUnits
from megafp8.numerics.formats import E4M3
from megafp8.numerics.quantize import QuantizedTensor
from megafp8.numerics.recipe import Recipe


@cache
def fp8_hardware(device: torch.device | str) -> tuple[bool, str]:
    """Say whether `device` multiplies FP8 natively, with the reason."""
    device = torch.device(device)
    if device.type != "cuda":
        return False, f"{device.type} has no FP8 matrix units"
    if torch.version.hip is not None:
        return False, "ROCm is not supported: its FP8 formats and layouts differ"
    if not torch.cuda.is_available():
        return False, "no CUDA device is available"
    return _has(FP8_UNITS, device)


def recipe_hardware(recipe: Recipe, device: torch.device | str) -> tuple[bool, str]:
    """Say whether `device` runs the GEMMs of a recipe natively, with the reason."""
    fp8, reason = fp8_hardware(device)
    if not fp8:
        return False, reason
    if recipe.gradient_format != E4M3 and "hybrid" not in recipe.spec.formats:
        return False, f"block-scaled GEMMs for {recipe.name} take E4M3 on both sides, not E5M2"
    return _has(recipe.spec.units, torch.device(device))


def writes_fp32(recipe: Recipe, device: torch.device | str) -> bool:
    """Whether the device's own FP8 GEMMs of a recipe can write fp32, for weight gradients.

    torch multiplies rows' scales with cuBLAS on Hopper and with CUTLASS elsewhere, which writes 16
    bits (torch 2.13, `ScaledBlas.cpp`).
    """
    device = torch.device(device)
    if not recipe_hardware(recipe, device)[0]:
        return False
    hopper = _capability(device)[0][0] == 9
    return not recipe.spec.per_row or (hopper and _built_for(_CUBLAS_SCALES))


# The CUDA release whose cuBLAS scales rows.
_CUBLAS_SCALES = (12, 9)


def _built_for(release: tuple[int, int]) -> bool:
    """Whether torch was built for this CUDA release or a later one."""
    # A torch without CUDA counts as older than any release.
    return tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]) >= release


@cache
def _has(units: MatrixUnits, device: torch.device) -> tuple[bool, str]:
    capability, found = _capability(device)
    if not units.has(capability):
        return False, f"{found}; {units.what} {units.where}"
    if units.cuda is not None and not _built_for(units.cuda):
        needed = ".".join(map(str, units.cuda))
        return False, f"torch was built for CUDA {torch.version.cuda}; {units.what} need {needed}"
    return True, found


def _capability(device: torch.device) -> tuple[tuple[int, int], str]:
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return (major, minor), f"{name} has compute capability {major}.{minor}"


def native(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether the device multiplies these two operands itself."""
    device = a.data.device
    if device.type != "cuda" or not fp8_hardware(device)[0]:
        return False
    # CuBLAS has block-scaled GEMMs for E4M3 alone; E5M2 gradients are decoded.
    if (_in_blocks(a) or _in_blocks(b)) and not a.format == b.format == E4M3:
        return False
    units = _units_for(a.block, _is_mx(a))
    return units is not None and _has(units, device)[0]


@cache
def _units_for(block: Block | None, e8m0: bool) -> MatrixUnits | None:
    """What multiplies operands in such blocks: recipes that cast alike are alike to a GEMM."""
    length = None if block is None else 0 if 0 in block else max(block)
    for spec in RECIPES.values():
        if spec.block_length == length and spec.e8m0 == e8m0:
            return spec.units
    return None


def native_mm(
    a: QuantizedTensor, a_t: bool, b: QuantizedTensor, b_t: bool, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a @ b, each maybe transposed, scaled; for operands for which `native` holds.

    What is not in the layout that the kernels take is copied: for dgrad w, for wgrad both.
    """
    left = _columns(a) if a_t else a.data  # row-major [m, k]
    right = b.data.t() if b_t else _columns(b).t()  # column-major [k, n]
    scale_a, scale_b = a.scale_inv, b.scale_inv
    if a.block is not None and b.block is not None:
        # Grids as [m, k/...] and [n, k/...].
        scale_a, scale_b = scale_a.t() if a_t else scale_a, scale_b if b_t else scale_b.t()
        if _is_mx(a):
            scale_a, scale_b, fast = swizzled(scale_a), swizzled(scale_b), False
        elif _in_blocks(a):
            return _block_mm(left, right, scale_a, scale_b, b.block[0] == b.block[1], dtype)
        else:
            # As if new: a dimension of one element may have any stride, and torch looks at it.
            scale_a, scale_b = scale_a.reshape(-1).view(-1, 1), scale_b.reshape(-1).view(1, -1)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        left, right, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast
    )


def _columns(operand: QuantizedTensor) -> Tensor:
    """Return the codes [m, k] as a contiguous [k, m]: the copy that is there, else a new one."""
    if operand.transposed is not None:
        return operand.transposed
    return operand.data.t().contiguous()


def _block_mm(
    left: Tensor,
    right: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    square: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Blocks of 128: 1x128 on the left, 128x128 (a weight) or 1x128 on the right.

    Split accumulation in all three GEMMs, as Transformer Engine has it for this recipe.
    """
    kinds = F.ScalingType
    if square:
        # The grid of square blocks lies column-major, its columns padded to 4 (cuBLAS).
        scale_b = F.pad(scale_b, (0, -scale_b.shape[1] % 4)).contiguous().t()
    else:
        scale_b = scale_b.t().contiguous().t()
    return F.scaled_mm(
        left,
        right,
        scale_a.t().contiguous().t(),
        kinds.BlockWise1x128,
        scale_b,
        kinds.BlockWise128x128 if square else kinds.BlockWise1x128,
        output_dtype=dtype,
    )


def swizzled(scales: Tensor) -> Tensor:
    """[n, k/32] E8M0 -> flat, in the order that Blackwell's kernels read: tiles of 128 x 4."""
    rows, columns = scales.shape
    padded = F.pad(scales.view(torch.uint8).contiguous(), (0, -columns % 4, 0, -rows % 128))
    # [n/128, 128, k/4, 4] -> [n/128, k/4, 128, 4]: a tile is 512 bytes in one run.
    tiles = padded.view(-(-rows // 128), 128, -(-columns // 4), 4).permute(0, 2, 1, 3)
    # In a tile rows r, r + 32, r + 64 and r + 96 lie side by side: [tiles, 32, 4, 4].
    order = tiles.reshape(-1, 4, 32, 4).transpose(1, 2)
    return order.reshape(-1).view(torch.float8_e8m0fnu)


def _is_mx(operand: QuantizedTensor) -> bool:
    return operand.scale_inv.dtype == torch.float8_e8m0fnu


def _in_blocks(operand: QuantizedTensor) -> bool:
    """Whether scales vary along what a GEMM sums over: neither one scale nor one a row."""
    return operand.block is not None and 0 not in operand.block
