"""The recipe that a configuration means, and that `numerics` accepts every value of it."""

from pathlib import Path

import pytest

from megafp8.config import load_config
from megafp8.numerics.formats import E4M3, E5M2
from megafp8.numerics.recipe import Recipe
from megafp8.precision import recipe_fields, recipe_from_config

PARITY = Path(__file__).resolve().parents[2] / "scripts" / "configs" / "parity.yaml"


def load(text: str):
    return load_config(["--config", str(PARITY), *text.split()])


def test_defaults_are_those_of_numerics() -> None:
    assert recipe_from_config(load("")) == Recipe()


def test_every_field_is_carried() -> None:
    recipe = recipe_from_config(
        load(
            "--fp8-margin -1 --fp8-amax-history-len 7 --fp8-amax-compute-algo ema:0.5 "
            "--fp8-nonfinite-amax freeze --fp8-weight-amax cast --fp8-recipe auto"
        )
    )
    assert recipe == Recipe(
        margin=-1,
        amax_history_len=7,
        amax_compute_algo="ema:0.5",
        nonfinite_amax="freeze",
        weight_amax="cast",
        forward_format=E4M3,
        gradient_format=E5M2,
    )


@pytest.mark.parametrize(
    "name",
    [
        "max",
        "most_recent",
        "quantile:0",
        "quantile:0.99",
        "quantile:1",
        "trimmed_max:0",
        "trimmed_max:3",
        "ema:0",
        "ema:0.9",
    ],
)
def test_numerics_takes_every_algorithm_that_the_configuration_takes(name: str) -> None:
    recipe = recipe_from_config(load(f"--fp8-amax-compute-algo {name}"))
    assert recipe is not None and recipe.amax_compute_algo == name


def test_margins_at_both_ends() -> None:
    for margin in (-32, 32):
        recipe = recipe_from_config(load(f"--fp8-margin {margin}"))
        assert recipe is not None and recipe.margin == margin


def test_without_fp8_there_is_no_recipe() -> None:
    config = load("--fp8-format none")
    assert recipe_from_config(config) is None and recipe_fields(config) == {}
