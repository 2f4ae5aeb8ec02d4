"""Definitions and denominators of the cast statistics."""

import math

import pytest
import torch

from megafp8.numerics import E4M3, E5M2, QuantizedTensor, quantize
from megafp8.numerics.statistics import (
    COUNTS,
    closeness,
    count,
    current_scale,
    scale_log2_drift,
    summarize,
)


def counts(values, scale: float = 1.0, fmt=E4M3) -> torch.Tensor:
    x = torch.as_tensor(values, dtype=torch.float32)
    scale_tensor = torch.tensor(scale)
    return count(x, QuantizedTensor(quantize(x, scale_tensor, fmt), 1 / scale_tensor, fmt))


X = [0.0, -0.0, 2**-10, -(2**-10), 2**-9, 1.0, -1.0, 3.0]


def test_underflow_is_of_all_elements_and_sees_negative_zero() -> None:
    assert quantize(torch.tensor(X), torch.tensor(1.0), E4M3).view(torch.uint8).tolist() == [
        *(0x00, 0x80, 0x00, 0x80, 0x01, 0x38, 0xB8, 0x44)
    ]
    found = summarize(counts(X))
    assert found["underflow"] == 25.0 and found["zeros"] == 25.0 and found["saturation"] == 0.0
    assert summarize(counts([0.0, -0.0, -0.0, 1.0]))["underflow"] == 0.0


def test_ranks_add_counts_not_percentages() -> None:
    total = counts(X) + counts([0.0, 1.0])
    assert summarize(total)["underflow"] == pytest.approx(20.0)
    assert summarize(total) == summarize(counts([*X, 0.0, 1.0]))


def test_empty_and_zero_tensors_are_undefined_not_nan() -> None:
    empty = summarize(counts(torch.empty(0, 4)))
    assert empty.pop("nonfinite") == 0 and set(empty.values()) == {None}
    zero = summarize(counts([0.0, -0.0]))
    assert zero == {
        **{"zeros": 100.0, "underflow": 0.0, "saturation": 0.0, "nonfinite": 0},
        **{"mse": 0.0, "sqnr_db": None, "cosine": None},
    }
    nonfinite = summarize(counts([float("nan"), float("inf")]))
    assert nonfinite["nonfinite"] == 2 and nonfinite["mse"] is None


def test_saturation_is_counted_separately() -> None:
    found = summarize(counts([449.0, -1000.0, 448.0, float("inf"), float("nan"), 1.0, 2.0, 4.0]))
    assert found["saturation"] == pytest.approx(100 * 3 / 8)
    assert found["nonfinite"] == 2 and found["underflow"] == 0.0
    assert counts([0.5, 100.0], scale=448.0)[COUNTS.index("saturation")] == 1
    assert summarize(counts([60000.0, 1.0], fmt=E5M2))["saturation"] == 50.0


def test_error_measures() -> None:
    exact = summarize(counts([1.0, -2.0, 448.0]))
    assert exact["mse"] == 0.0 and exact["sqnr_db"] == math.inf
    assert exact["cosine"] == pytest.approx(1.0)
    x = torch.randn(4096)
    scale = 448.0 / x.abs().max().item()
    found = summarize(counts(x, scale))
    dq = (x * scale).to(torch.float8_e4m3fn).float() / scale
    assert found["mse"] == pytest.approx((dq - x).square().mean().item(), rel=1e-4)
    expected = 20 * math.log10(x.norm().item() / (x - dq).norm().item())
    assert found["sqnr_db"] == pytest.approx(expected, abs=1e-3) and 28 < expected < 36
    cosine = torch.nn.functional.cosine_similarity(x, dq, dim=0).item()
    assert found["cosine"] == pytest.approx(cosine, abs=1e-5)
    # Strides change nothing but the order of a sum, and nonfinite inputs do not spoil it.
    turned = counts(x.view(64, 64).t(), scale)
    torch.testing.assert_close(turned, counts(x, scale), rtol=1e-12, atol=0)
    spoiled = summarize(counts(torch.cat([x, torch.tensor([float("nan")])]), scale))
    assert spoiled["mse"] == pytest.approx(found["mse"]) and spoiled["cosine"] == pytest.approx(
        found["cosine"]
    )


def test_closeness_of_any_two_tensors() -> None:
    wanted = torch.randn(64, 32)
    found = wanted + 0.01 * torch.randn(64, 32)
    sqnr_db, cosine = closeness(found, wanted)
    ratio = (wanted.double().norm() / (wanted.double() - found.double()).norm()).item()
    assert sqnr_db == pytest.approx(20 * math.log10(ratio)) and 39 < sqnr_db < 41
    expected = torch.nn.functional.cosine_similarity(wanted.flatten(), found.flatten(), dim=0)
    assert cosine == pytest.approx(expected.item(), abs=1e-6)
    # A factor is an error that the cosine does not see.
    assert closeness(2 * wanted, wanted) == (pytest.approx(0.0), pytest.approx(1.0))
    assert closeness(wanted, wanted) == (math.inf, pytest.approx(1.0))
    zero = torch.zeros(2)
    assert closeness(zero + 1, zero) == (None, None)
    assert closeness(zero, zero + 1) == (0.0, None)
    for bad in (math.inf, math.nan):
        assert all(math.isnan(value) for value in closeness(zero + bad, zero + 1))


def test_scale_drift() -> None:
    amax = torch.tensor([1.0, 2.0, 0.0, float("inf"), float("nan")])
    assert current_scale(amax, E4M3).tolist() == [448.0, 224.0, 1.0, 1.0, 1.0]
    drift = scale_log2_drift(torch.tensor([448.0, 448.0, 1.0, 1.0, 1.0]), amax, E4M3)
    assert drift.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert current_scale(amax[:1], E5M2, margin=1).tolist() == [28672.0]
