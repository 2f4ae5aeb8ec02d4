"""From a window of amaxes to the scale that it gives, in a run and in a checkpoint.

A scale follows from its window by the recipe's rule: format, margin, cap, power of two, algorithm.
Two windows do not tell: an empty one (the first scale: 1.0, or that of a weight's masters), and one
that an inf froze (`nonfinite_amax="freeze"`), whose scale is that of an earlier window.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafp8.numerics.recipe import Recipe, Role, amax_algorithm
from megafp8.numerics.scales import next_scale, round_down_to_power_of_2

_FP32 = torch.finfo(torch.float32)
# Algorithms with sums and powers differ between devices in the last bits.
_SAME = 2.0**-16


def held_entries(window: Tensor, recipe: Recipe) -> Tensor:
    """Return the newest filled entries of a window [H] that a recipe would hold, on the CPU."""
    entries = torch.nan_to_num(window.float().cpu(), nan=torch.inf, posinf=torch.inf)
    # 0 marks a place that no update has filled.
    entries = entries[entries > 0]
    if recipe.nonfinite_amax == "skip":
        entries = entries[entries.isfinite()]
    return entries[-recipe.amax_history_len :]


def window_scale(
    history: Tensor, scale: Tensor, fp8_max: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Choose the scales of windows.

    Args:
        history: fp32 [H, N], newest last, 0 = unfilled.
        scale: fp32 [N], kept where a window does not tell.
        fp8_max: fp32 [N] or [], largest values of the formats.
        recipe: the rule.

    Returns:
        (scales [N], the amaxes [N] they were chosen for; 0, inf or NaN: the window does not tell).
    """
    chosen = amax_algorithm(recipe.amax_compute_algo)(history)  # [H, N] -> [N]
    power_of_2, cap = recipe.power_of_2_scales, recipe.scale_cap
    return next_scale(chosen, scale, fp8_max, recipe.margin, power_of_2, cap), chosen


def fitting_scale(scale: Tensor, history: Tensor, role: Role, recipe: Recipe) -> Tensor:
    """Return the scales [...] that windows [..., H] give, `scale` where they do not tell."""
    columns = history.reshape(-1, history.shape[-1]).t().contiguous()  # [..., H] -> [H, N]
    fp8_max = scale.new_tensor(recipe.format(role).max)
    return window_scale(columns, scale.reshape(-1), fp8_max, recipe)[0].reshape(scale.shape)


def moved_scale(
    scale: Tensor, keys: Sequence[tuple[str, Role]], before: Recipe, now: Recipe
) -> Tensor:
    """Return what scales [N] of one recipe are by another, without their windows.

    Formats and margins are powers of two apart, so nothing is rounded, and cap and power of two are
    applied as ever; a cap or a rounding of before cannot be undone. 1.0 stays: every tensor starts
    with it, whatever the rule.

    Args:
        scale: fp32 [N].
        keys: (module, role) of each.
        before: recipe that chose them.
        now: recipe that will use them.
    """
    # scale = fp8_max / amax / 2**margin: a ratio of two rules has no amax in it.
    margins = 2.0 ** (before.margin - now.margin)
    ratios = [now.format(role).max / before.format(role).max * margins for _, role in keys]
    moved = scale * torch.tensor(ratios, dtype=torch.float32).to(scale.device)
    moved = moved.clamp(min=_FP32.tiny, max=now.scale_cap or _FP32.max)
    if now.power_of_2_scales:
        moved = round_down_to_power_of_2(moved)
    return torch.where(scale == 1.0, scale, moved)


def same_scale(scale: Tensor, other: Tensor) -> Tensor:
    """Return, elementwise, whether two scales are the same but for the rounding of a device."""
    return (scale - other).abs() <= _SAME * other
