"""Recipe validation and the functions that choose an amax from a window."""

import dataclasses

import numpy as np
import pytest
import torch

from megafp8.errors import PrecisionError
from megafp8.numerics import E4M3, E5M2, Recipe, ScaleRegistry
from megafp8.numerics.recipe import amax_algorithm

ENTRIES = [[3.0, 0.5, 2.0], [4.0], [], [1.0, 9.0, 2.0, 5.0, 7.0, 0.25], [6.0, 6.0, 1.0, 8.0]]


def windows(length: int = 6) -> torch.Tensor:
    columns = [[0.0] * (length - len(entries)) + entries for entries in ENTRIES]
    return torch.tensor(columns).t().contiguous()


def chosen(algorithm: str) -> list[float]:
    return amax_algorithm(algorithm)(windows()).tolist()


def test_max_and_most_recent() -> None:
    assert chosen("max") == [3.0, 4.0, 0.0, 9.0, 8.0]
    assert chosen("most_recent") == [2.0, 4.0, 0.0, 0.25, 8.0]


@pytest.mark.parametrize("q", [0.0, 0.25, 0.5, 0.99, 1.0])
def test_quantile_over_filled_entries(q: float) -> None:
    expected = [np.quantile(entries, q) if entries else 0.0 for entries in ENTRIES]
    np.testing.assert_allclose(chosen(f"quantile:{q}"), expected, rtol=1e-6)


@pytest.mark.parametrize("k", [0, 1, 2, 5, 100])
def test_trimmed_max_over_filled_entries(k: int) -> None:
    expected = [
        sorted(entries, reverse=True)[min(k, len(entries) - 1)] if entries else 0.0
        for entries in ENTRIES
    ]
    assert chosen(f"trimmed_max:{k}") == expected


@pytest.mark.parametrize("b", [0.0, 0.5, 0.9])
def test_ema_over_filled_entries(b: float) -> None:
    expected = []
    for entries in ENTRIES:
        smoothed = entries[0] if entries else 0.0
        for amax in entries[1:]:
            smoothed = b * smoothed + (1 - b) * amax
        expected.append(smoothed)
    np.testing.assert_allclose(chosen(f"ema:{b}"), expected, rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["quantile:0.9", "trimmed_max:1", "ema:0.9"])
def test_a_half_filled_window_gives_the_same_scale_as_a_full_one(algorithm: str) -> None:
    scales = []
    for length in (3, 100):
        made = ScaleRegistry(Recipe(amax_history_len=length, amax_compute_algo=algorithm))
        made.register("a", "input")
        made.register("unused", "input")
        made.finalize("cpu")
        for amax in (2.0, 3.0, 2.5):
            made.record(0, torch.tensor(amax))
            made.update()
        scales.append(made.scale[0].item())
        assert made.scale[1].item() == 1.0
    assert scales[0] == pytest.approx(scales[1], rel=1e-6)
    assert 448 / 3.0 < scales[0] < 448 / 2.0


@pytest.mark.parametrize(
    "algorithm",
    ["", "maximum", "max:1", "quantile", "quantile:", "quantile:1.1", "quantile:-0.1", "ema:1"]
    + ["ema:nan", "trimmed_max:1.5", "trimmed_max:-1", "trimmed_max:x", "quantile:inf"],
)
def test_unknown_algorithms_are_refused(algorithm: str) -> None:
    with pytest.raises(PrecisionError, match="amax_compute_algo"):
        Recipe(amax_compute_algo=algorithm)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"margin": 0.5}, "margin 0.5 is not an integer"),
        ({"margin": True}, "margin True"),
        ({"amax_history_len": 0}, "amax_history_len 0 is not a positive integer"),
        ({"nonfinite_amax": "ignore"}, "'ignore' is not one of skip, freeze"),
        ({"weight_amax": "late"}, "'late' is not one of updated, cast"),
        ({"forward_format": E5M2}, "no GEMM takes two e5m2 operands"),
    ],
)
def test_values_without_a_meaning_are_refused(fields, message: str) -> None:
    with pytest.raises(PrecisionError, match=message):
        Recipe(**fields)


def test_recipe_is_frozen_hashable_and_knows_roles() -> None:
    recipe = Recipe()
    assert hash(recipe) == hash(Recipe()) and recipe == Recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.margin = 2  # type: ignore[misc]
    roles = ("input", "weight", "grad_output")
    assert [recipe.format(role) for role in roles] == [E4M3, E4M3, E5M2]
    assert [Recipe(gradient_format=E4M3).format(role) for role in roles] == [E4M3] * 3
    with pytest.raises(PrecisionError, match="role 'logits'"):
        recipe.format("logits")  # type: ignore[arg-type]
