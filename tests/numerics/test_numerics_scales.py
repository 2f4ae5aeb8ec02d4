"""From amax to scale: edge cases, powers of two, the exponents of MXFP8."""

import math

import numpy as np
import pytest
import torch

from megafp8.numerics import E4M3, E5M2, Recipe, ScaleRegistry
from megafp8.numerics.scales import (
    current_scale,
    e8m0_codes,
    e8m0_scales,
    next_scale,
    round_down_to_power_of_2,
)
from tests.support import reference

INF, NAN = math.inf, math.nan
FP32_MAX = torch.finfo(torch.float32).max
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)


def wide(count: int = 2000) -> torch.Tensor:
    """Positive fp32 over all exponents, the neighbours of powers of two included."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.exp2(torch.arange(-126, 128).float())
    return torch.cat(
        (
            torch.rand(count, generator=generator)
            * torch.exp2(torch.randint(-140, 127, (count,), generator=generator).float()),
            powers,
            torch.nextafter(powers, torch.tensor(0.0)),
            torch.nextafter(powers, torch.tensor(INF)),
            448.0 * powers[powers < 2.0**119],
            torch.nextafter(448.0 * powers[powers < 2.0**119], torch.tensor(INF)),
        )
    )


def test_current_scale_by_case() -> None:
    # As Transformer Engine's compute_scale_from_amax: 1.0 for 0, inf and NaN, FP32 max for tiny.
    amax = torch.tensor([0.0, 1e-40, 3.0, 448.0, INF, NAN])
    assert current_scale(amax, E4M3).tolist() == [
        1.0,
        FP32_MAX,
        float(np.float32(448) / 3),
        1,
        1,
        1,
    ]
    powers = current_scale(amax, E4M3, power_of_2=True).tolist()
    assert powers == [1.0, 2.0**127, 128.0, 1.0, 1.0, 1.0]
    assert current_scale(torch.tensor([FP32_MAX]), E4M3, margin=64)[0] == 2.0**-126
    assert torch.isfinite(1 / current_scale(torch.tensor([FP32_MAX]), E4M3, margin=64)).all()


@FORMATS
def test_power_of_2_scales_never_saturate_and_lose_less_than_a_factor_of_2(fmt) -> None:
    amax = wide()
    amax = amax[amax > 0]
    exact, power = current_scale(amax, fmt), current_scale(amax, fmt, power_of_2=True)
    assert (torch.frexp(power).mantissa == 0.5).all()
    assert (power <= exact).all() and (power * 2 > exact).all()


def test_rounding_down_masks_bits_where_a_logarithm_rounds_up() -> None:
    below = torch.nextafter(torch.tensor(2.0**20), torch.tensor(0.0))
    assert torch.exp2(torch.floor(torch.log2(below))) == 2.0**20  # what is not done here
    assert round_down_to_power_of_2(below) == 2.0**19
    kept = torch.tensor([1.0, 2.0**-126, 2.0**127, INF])
    assert torch.equal(round_down_to_power_of_2(kept), kept)
    assert round_down_to_power_of_2(torch.tensor([NAN])).isnan().all()


def test_cap_limits_the_scale_and_power_of_2_comes_after_it() -> None:
    amax, before = torch.tensor([1e-9, 100.0, 0.0]), torch.tensor([7.0, 7.0, 7.0])
    assert next_scale(amax, before, 448.0, 0, cap=100.0).tolist() == pytest.approx([100, 4.48, 7])
    assert next_scale(amax, before, 448.0, 0, True, 100.0).tolist() == [64.0, 4.0, 7.0]


@pytest.mark.parametrize("fields", [{"scale_cap": 50.0}, {"power_of_2_scales": True}])
def test_registry_applies_cap_and_power_of_2(fields) -> None:
    registry = ScaleRegistry(Recipe(amax_history_len=4, **fields))
    registry.register("m", "input")
    registry.finalize("cpu")
    expected = reference.DelayedScaling(E4M3, 4, **fields)
    for amax in (3.0, 1e-3, 0.0, 700.0, 1e-39, 2.0, 2.0, 2.0, 2.0):
        registry.record(0, torch.tensor(amax))
        registry.update()
        expected.update([amax])
        assert float(registry.scale[0]) == float(expected.scale), amax
        assert float(registry.scale_inv[0]) == float(np.float32(1) / expected.scale)


@FORMATS
def test_e8m0_exponents_are_the_quotient_rounded_up(fmt) -> None:
    amax = wide()
    codes = e8m0_codes(amax, fmt).tolist()
    for value, code in zip(amax.tolist(), codes, strict=True):
        assert code == reference.e8m0(value, fmt), value
    # As OCP's floor(log2(amax)) - emax, but where that would saturate: one more.
    largest = torch.frexp(amax).exponent - 1 - (8 if fmt is E4M3 else 15)
    ocp = (largest + 127).clamp(0, 254)
    saturates = torch.ldexp(amax.double(), -(ocp - 127)) > fmt.max
    assert 0 < int(saturates.sum()) < len(amax) / 2
    assert torch.equal(torch.tensor(codes), ocp + saturates)


@FORMATS
def test_e8m0_special_values(fmt) -> None:
    amax = torch.tensor([0.0, 2.0**-149, INF, NAN, fmt.max, 1.0])
    assert e8m0_codes(amax, fmt).tolist()[:5] == [0, 0, 254, 255, 127]
    assert e8m0_codes(amax, fmt)[5] == 127 - (8 if fmt is E4M3 else 15)


def test_e8m0_scales_are_exact_inverses() -> None:
    codes = torch.arange(256).to(torch.uint8)
    scales, values = e8m0_scales(codes), codes.view(torch.float8_e8m0fnu).float()
    assert (scales[:255].double() * values[:255].double() == 1.0).all()
    assert scales[255].isnan() and values[255].isnan()
