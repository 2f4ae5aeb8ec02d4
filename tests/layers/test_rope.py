"""Rotary positions against complex products in fp64, and Llama 3's rescaled frequencies."""

import math

import pytest
import torch
from torch import Tensor

from megafp8.layers.rope import Rope, RopeScaling, inverse_frequencies
from tests.model.small import ulps_apart

CPU = torch.device("cpu")
LLAMA_31 = RopeScaling(8.0, 1.0, 4.0, 8192)


def rotated(x: Tensor, base: float, dim: int) -> Tensor:
    """Channel pairs (i, i + dim/2) as complex numbers, turned by position * base^(-2i/dim)."""
    half = dim // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:dim].double())
    speed = torch.tensor([base ** (-2 * i / dim) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(x.shape[0], dtype=torch.float64)[:, None] * speed
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    return torch.cat([turned.real, turned.imag, x[..., dim:].double()], -1)


def llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    """One frequency as in `_compute_llama3_parameters` of transformers, case by case."""
    wavelength = 2 * math.pi / frequency
    original = scaling.original_max_position_embeddings
    if wavelength < original / scaling.high_freq_factor:
        return frequency
    if wavelength > original / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (original / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize("dim, base", [(16, 10000.0), (16, 500000.0), (8, 10000.0)])
def test_rotation_is_a_complex_product(dim, base):
    x = torch.randn(50, 2, 3, 16)
    y = Rope(dim, 64, base, None, CPU).apply(x)
    # Angles are fp32: at position 49 one rounding of the angle is 2^-19.
    assert (y - rotated(x, base, dim)).abs().max() < 3e-5
    assert torch.equal(y[..., dim:], x[..., dim:])
    assert torch.equal(y[0], x[0])


def test_gradient_is_the_rotation_back():
    rope = Rope(8, 5, 10000.0, None, CPU)
    x = torch.randn(5, 2, 3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rope.apply, (x,))
    grad = torch.randn(5, 2, 3, 12, dtype=torch.float64)
    (dx,) = torch.autograd.grad(rope.apply(x), x, grad)
    assert torch.allclose(rope.apply(dx), grad, atol=1e-6)


def test_bf16_is_rounded_once():
    x = torch.randn(33, 2, 4, 32).bfloat16()
    y = Rope(32, 33, 10000.0, None, CPU).apply(x)
    assert y.dtype == torch.bfloat16
    # fp32 inside: off by one grid step at most, where fp32's own error crosses a midpoint.
    exact = rotated(x, 10000.0, 32).to(torch.bfloat16)
    assert ulps_apart(y, exact) <= 1
    assert (y != exact).float().mean() < 1e-3


def test_scores_depend_on_distance_alone():
    rope = Rope(16, 40, 10000.0, None, CPU)
    q, k = torch.randn(2, 16)
    queries, keys = (rope.apply(v.expand(40, 1, 1, 16))[:, 0, 0] for v in (q, k))
    scores = queries @ keys.t()
    for distance in (0, 1, 7):
        assert scores.diagonal(-distance).std() < 1e-4


@pytest.mark.parametrize("scaling", [LLAMA_31, RopeScaling(32.0, 1.0, 4.0, 8192)])
def test_llama3_scaling(scaling):
    plain = inverse_frequencies(128, 500000.0, None)
    scaled = inverse_frequencies(128, 500000.0, scaling)
    wanted = [llama3_frequency(f, scaling) for f in plain.double().tolist()]
    assert torch.allclose(scaled.double(), torch.tensor(wanted).double(), rtol=1e-6, atol=0.0)
    ratio = scaled / plain
    kept, stretched = ratio == 1.0, torch.isclose(ratio, torch.tensor(1 / scaling.factor))
    # All three cases occur: wavelength 2 pi 500000^(i/64) passes 2048 at i = 28.2, 8192 at 34.98.
    assert kept.nonzero().flatten().tolist() == list(range(29))
    assert stretched.nonzero().flatten().tolist() == list(range(35, 64))


def test_llama3_scaling_reaches_the_tables():
    scaled = Rope(128, 64, 500000.0, LLAMA_31, CPU)
    frequency = llama3_frequency(500000.0 ** (-126 / 128), LLAMA_31)
    assert float(scaled.sin[63, 0, 0, 63]) == pytest.approx(math.sin(63 * frequency), rel=1e-5)
    assert not torch.equal(scaled.cos, Rope(128, 64, 500000.0, None, CPU).cos)
