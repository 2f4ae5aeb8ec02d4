"""Rotary position embedding, with Llama 3's frequency scaling. Tables and arithmetic are fp32."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's rescaling of low frequencies (Megatron's --use-rope-scaling).

    Attributes:
        factor: wavelengths above the low-frequency bound are stretched by this.
        low_freq_factor, high_freq_factor: bounds as fractions of the original context.
        original_max_position_embeddings: context length of the original training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def inverse_frequencies(dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """fp32 [dim / 2]: base^(-2i/dim), rescaled as in Meta's Llama 3 reference if asked.

    Wavelengths below original/high stay, those above original/low are multiplied by `factor`,
    those between are blended linearly in original/wavelength.
    """
    freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None:
        return freq
    wavelength = 2 * math.pi / freq
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return freq * (blend + (1.0 - blend) / scaling.factor)


class Rope:
    """Cosine and sine tables for positions 0..length-1.

    Args:
        dim: rotated channels of a head (rotary_percent of head_dim), even.
        length: positions.
        base: rotary base.
        scaling: Llama 3 scaling or None.
        device: where the tables live.
    """

    def __init__(
        self, dim: int, length: int, base: float, scaling: RopeScaling | None, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(length).float(), inverse_frequencies(dim, base, scaling))
        self.dim = dim
        self.cos = angles.cos().to(device)[:, None, None]  # [s, 1, 1, dim/2]
        self.sin = angles.sin().to(device)[:, None, None]

    def apply(self, x: Tensor) -> Tensor:
        """Rotate [s, b, heads, d]: channel i with channel i + dim/2 (the Llama convention)."""
        length = x.shape[0]
        return _RopeFunction.apply(x, self.cos[:length], self.sin[:length], self.dim)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y[..., : dim // 2] = first * cos - second * sin  # fp32 inside: cos and sin are fp32
    y[..., dim // 2 : dim] = second * cos + first * sin
    if dim < x.shape[-1]:
        y[..., dim:] = x[..., dim:]
    return y


class _RopeFunction(torch.autograd.Function):
    """A rotation; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
        ctx.cos, ctx.sin, ctx.dim = cos, sin, dim
        return _rotate(x, cos, sin, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _rotate(grad, ctx.cos, -ctx.sin, ctx.dim), None, None, None
