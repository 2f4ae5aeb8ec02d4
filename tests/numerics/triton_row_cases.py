"""Checks of the kernels for rows and columns against `numerics.granular`; see triton_cases.py."""

import pytest
import torch

from megafp8.numerics import E4M3, E5M2, Fp8Format, Recipe, compute_amax, quantize_blocks
from megafp8.numerics.kernels.rows import cast_rows
from tests.numerics.triton_block_cases import assert_same, sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=repr)
@pytest.mark.parametrize("shape", [(1, 1), (67, 130)])
def test_rows_and_columns(
    shape: tuple[int, int], fmt: Fp8Format, dtype: torch.dtype, power_of_2: bool
) -> None:
    x = sample(*shape, dtype)
    recipe = Recipe(name="rowwise", power_of_2_scales=power_of_2)
    for rows, columns in ((True, True), (True, False), (False, True)):
        found = cast_rows(x, fmt, power_of_2=power_of_2, rows=rows, columns=columns)
        *operands, amax = found
        assert torch.equal(amax.isnan(), compute_amax(x).isnan())
        assert amax.isnan() or torch.equal(amax, compute_amax(x))
        for block, operand, there in zip(((1, 0), (0, 1)), operands, (rows, columns), strict=True):
            assert (operand is not None) == there
            if operand is None:
                continue
            wanted, _ = quantize_blocks(x, block, fmt, recipe)
            assert torch.equal(operand.scale_inv, wanted.scale_inv)
            assert operand.scale_inv.shape == wanted.scale_inv.shape
            assert_same(operand.data, wanted.data, wanted.dequantize(torch.float32).isnan())
            assert (operand.block, operand.power_of_2) == (wanted.block, wanted.power_of_2)
        if columns:
            assert operands[1].transposed.is_contiguous()
            assert operands[1].data.data_ptr() == operands[1].transposed.data_ptr()


def test_any_strides() -> None:
    x = sample(70, 140, torch.bfloat16).t()
    found, plain = (cast_rows(t, E4M3, power_of_2=False) for t in (x, x.contiguous()))
    for one, other in zip(found[:2], plain[:2], strict=True):
        assert torch.equal(
            one.data.contiguous().view(torch.uint8), other.data.contiguous().view(torch.uint8)
        )
        assert torch.equal(one.scale_inv, other.scale_inv)
