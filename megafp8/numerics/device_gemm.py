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
    capability, found = _capability(device)
    if capability < (8, 9):
        return False, f"{found}; FP8 matrix units need 8.9"
    return True, found


def recipe_hardware(recipe: Recipe, device: torch.device | str) -> tuple[bool, str]:
    """Say whether `device` runs the GEMMs of a recipe natively, with the reason."""
    fp8, reason = fp8_hardware(device)
    if fp8 and recipe.name.startswith("rowwise"):
        return _row_units(torch.device(device))
    if not fp8 or recipe.name not in ("blockwise", "mxfp8"):
        return fp8, reason
    if recipe.gradient_format != E4M3:
        return False, f"block-scaled GEMMs for {recipe.name} take E4M3 on both sides, not E5M2"
    return _block_units(recipe.name == "mxfp8", torch.device(device))


def writes_fp32(recipe: Recipe, device: torch.device | str) -> bool:
    """Whether the device's own FP8 GEMMs of a recipe can write fp32, for weight gradients.

    torch multiplies rows' scales with cuBLAS on Hopper and with CUTLASS elsewhere, which writes 16
    bits (torch 2.13, `ScaledBlas.cpp`).
    """
    device = torch.device(device)
    if not recipe_hardware(recipe, device)[0]:
        return False
    by_rows = recipe.name.startswith("rowwise")
    return not by_rows or (_capability(device)[0][0] == 9 and _built_for(_CUBLAS_SCALES))


@cache
def _row_units(device: torch.device) -> tuple[bool, str]:
    capability, found = _capability(device)
    if capability[0] > 10:
        return False, f"{found}; GEMMs with a scale a row are there for 8.9, 9.x and 10.x"
    return True, found


# The CUDA release whose cuBLAS scales rows and blocks of 128.
_CUBLAS_SCALES = (12, 9)


def _built_for(release: tuple[int, int]) -> bool:
    """Whether torch was built for this CUDA release or a later one."""
    return tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]) >= release


@cache
def _block_units(mx: bool, device: torch.device) -> tuple[bool, str]:
    capability, found = _capability(device)
    if mx:
        if capability[0] != 10:
            return False, f"{found}; MXFP8 matrix units need 10.x (Blackwell)"
        return True, found
    if capability != (9, 0):
        return False, f"{found}; GEMMs with 128x128 blocks need 9.0 (Hopper)"
    if not _built_for(_CUBLAS_SCALES):
        cuda = torch.version.cuda
        return False, f"torch was built for CUDA {cuda}; GEMMs with 128x128 blocks need 12.9"
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
    if not _in_blocks(a) and not _in_blocks(b):
        return a.block is None or _row_units(device)[0]
    return a.format == b.format == E4M3 and _block_units(_is_mx(a), device)[0]


def native_mm(
    a: QuantizedTensor, a_t: bool, b: QuantizedTensor, b_t: bool, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return a @ b, each maybe transposed, scaled; for operands for which `native` holds.

    What is not in the layout that the kernels take is copied: for dgrad w, for wgrad both.
    """
    left = _columns(a) if a_t else a.data
    right = b.data.t() if b_t else _columns(b).t()
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
    tiles = padded.view(-(-rows // 128), 128, -(-columns // 4), 4).permute(0, 2, 1, 3)
    order = tiles.reshape(-1, 4, 32, 4).transpose(1, 2)
    return order.reshape(-1).view(torch.float8_e8m0fnu)


def _is_mx(operand: QuantizedTensor) -> bool:
    return operand.scale_inv.dtype == torch.float8_e8m0fnu


def _in_blocks(operand: QuantizedTensor) -> bool:
    """Whether scales vary along what a GEMM sums over: neither one scale nor one a row."""
    return operand.block is not None and 0 not in operand.block
