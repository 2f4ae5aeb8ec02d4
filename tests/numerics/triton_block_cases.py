"""Checks of the block kernels against `numerics.granular`; see triton_cases.py."""

import pytest
import torch
from torch import Tensor

from megafp8.numerics import E4M3, E5M2, Fp8Format, Recipe, quantize_blocks
from megafp8.numerics.kernels.blocks import TILES, cast_blocks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RECIPES = {
    128: [Recipe(name="blockwise"), Recipe(name="blockwise", power_of_2_scales=True)],
    32: [Recipe(name="mxfp8", power_of_2_scales=True)],
}


def sample(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Values over many magnitudes, with a block of zeros, tiny and huge ones, inf and NaN."""
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator)
    x *= 10.0 ** torch.randint(-6, 4, (m, 1), generator=generator)
    x[:1] = 0.0
    x[-1, -1], x[m // 2, k // 2] = -0.0, 3e4
    if m > 20:
        x[20, 0], x[18, 1] = float("inf"), float("nan")
        x[16] *= 1e-30
    return x.to(dtype)


def assert_same(found: Tensor, wanted: Tensor, nan: Tensor) -> None:
    a, b = (t.contiguous().view(torch.uint8) for t in (found, wanted))
    assert torch.equal(a[~nan], b[~nan])
    assert bool((a[nan] & 0x7F == 0x7F).all()) or found.dtype == torch.float8_e5m2


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(E4M3, torch.bfloat16), (E5M2, torch.bfloat16), (E4M3, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(5, 40), (130, 140)])
@pytest.mark.parametrize("block", list(TILES), ids=str)
def test_blocks(
    block: tuple[int, int], shape: tuple[int, int], fmt: Fp8Format, dtype: torch.dtype
) -> None:
    x = sample(*shape, dtype)
    for recipe in RECIPES[max(block)]:
        wanted, largest = quantize_blocks(x, block, fmt, recipe)
        nan = wanted.dequantize(torch.float32).isnan()
        mx, power = recipe.name == "mxfp8", recipe.power_of_2_scales
        for transposed in (False, True):
            found, amax = cast_blocks(x, block, fmt, mx=mx, power_of_2=power, transposed=transposed)
            assert found.scale_inv.dtype == wanted.scale_inv.dtype
            assert torch.equal(
                found.scale_inv.view(torch.uint8), wanted.scale_inv.view(torch.uint8)
            )
            assert_same(found.data, wanted.data, nan)
            assert torch.equal(amax, largest) or (amax.isnan() and largest.isnan())
            assert (found.block, found.power_of_2) == (wanted.block, wanted.power_of_2)
            assert (found.transposed is not None) == transposed


def test_any_strides() -> None:
    x = sample(70, 140, torch.bfloat16).t()
    for block in TILES:
        found, plain = (
            cast_blocks(t, block, E4M3, mx=False, power_of_2=True)[0] for t in (x, x.contiguous())
        )
        assert torch.equal(found.data.view(torch.uint8), plain.data.view(torch.uint8))
        assert torch.equal(found.scale_inv, plain.scale_inv)
