"""Runs a linear's three products once, to hear before training what a device has no kernel for.

cuBLAS chooses kernels by size, and for some sizes it has none: with scales of rows on Hopper, for
few rows of the result and a long sum (CUBLAS_STATUS_NOT_SUPPORTED; cuBLAS 12.9 and 13).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.config.recipes import Axis
from megafp8.numerics.gemm import dgrad, fprop, wgrad
from megafp8.numerics.granular import quantize_blocks, quantize_tensor
from megafp8.numerics.quantize import QuantizedTensor, compute_amax
from megafp8.numerics.recipe import Recipe, Role


def missing_product(
    recipe: Recipe,
    device: torch.device,
    size: tuple[int, int, int],
    wgrad_dtype: torch.dtype = torch.bfloat16,
) -> str | None:
    """Multiply zeros of one linear's sizes.

    Args:
        recipe: of the linear.
        device: where it will run.
        size: (tokens, in features, out features) of its GEMMs on this rank.
        wgrad_dtype: of its weight gradients.

    Returns:
        The first product that raises, with what was raised, in one line; None if all three run.
    """
    tokens, inner, outer = size

    def operand(role: Role, axis: Axis) -> QuantizedTensor:
        # Weights are [out, in], inputs [tokens, in], output gradients [tokens, out].
        rows = outer if role == "weight" else tokens
        x = torch.zeros(
            rows, outer if role == "grad_output" else inner, dtype=torch.bfloat16, device=device
        )
        return _cast(recipe, role, axis, x)

    try:
        # Named before it is tried, for the message of one that raises.
        gemm = "fprop"
        fprop(operand("input", "features"), operand("weight", "features"))
        gemm = "dgrad"
        dgrad(operand("grad_output", "features"), operand("weight", "tokens"))
        if recipe.fp8_wgrad:
            gemm = "wgrad"
            wgrad(operand("grad_output", "tokens"), operand("input", "tokens"), wgrad_dtype)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a kernel's own fault shows late
    except (RuntimeError, ValueError) as error:
        return f"{gemm}: {' '.join(str(error).split())[:200]}"
    return None


def _cast(recipe: Recipe, role: Role, axis: Axis, x: Tensor) -> QuantizedTensor:
    fmt = recipe.format(role)
    if recipe.spec.per_tensor:
        return quantize_tensor(x, fmt, compute_amax(x), recipe.power_of_2_scales)
    return quantize_blocks(x, recipe.spec.block(role, axis), fmt, recipe)[0]
