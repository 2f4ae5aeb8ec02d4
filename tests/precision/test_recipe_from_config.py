"""The recipe that a configuration means, and that `numerics` accepts every value of it."""

from pathlib import Path

import pytest

from megafp8.config import load_config
from megafp8.config.recipes import RECIPES
from megafp8.errors import PrecisionError
from megafp8.numerics.formats import E4M3, E5M2
from megafp8.numerics.recipe import Recipe
from megafp8.precision import high_precision_wgrad, recipe_fields, recipe_from_config

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


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("fmt", ["hybrid", "e4m3"])
def test_every_recipe_takes_both_formats(name: str, fmt: str) -> None:
    config = load(f"--fp8-recipe {name} --fp8-format {fmt}")
    recipe = recipe_from_config(config)
    assert recipe is not None and recipe.name == name and recipe.forward_format == E4M3
    assert recipe.gradient_format == (E5M2 if fmt == "hybrid" else E4M3)
    assert recipe.power_of_2_scales == RECIPES[name].power_of_2_scales
    assert recipe.fp8_wgrad == (name != "rowwise_with_gw_hp")
    fields = recipe_fields(config)
    assert fields["name"] == name and ("amax_history_len" in fields) == RECIPES[name].stateful


def test_options_of_recipes_are_carried() -> None:
    recipe = recipe_from_config(
        load("--fp8-scale-cap 1e4 --fp8-power-of-2-scales --fp8-fake-quant --no-fp8-wgrad")
    )
    assert recipe == Recipe(scale_cap=1e4, power_of_2_scales=True, fake_quant=True, fp8_wgrad=False)
    fp32 = recipe_from_config(load("--fp8-recipe blockwise --no-fp8-power-of-2-scales"))
    assert fp32 is not None and not fp32.power_of_2_scales


def test_rowwise_under_sequence_parallelism_has_high_precision_weight_gradients() -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel"
    for name in RECIPES:
        config = load(f"--fp8-recipe {name} {layout}")
        recipe = recipe_from_config(config)
        assert recipe is not None and recipe.fp8_wgrad == ("rowwise" not in name), name
    assert "columns" in str(high_precision_wgrad(load(f"--fp8-recipe rowwise {layout}")))


def test_numerics_refuses_what_has_no_meaning() -> None:
    for fields, message in (
        ({"name": "rows"}, "name 'rows' is not one of delayed"),
        ({"name": "mxfp8"}, "recipe mxfp8 has power-of-two scales"),
        ({"scale_cap": 0.0}, "scale_cap 0.0 is not a number in 2"),
        ({"scale_cap": 1e-45}, "scale_cap 1e-45 is not a number in 2"),
        ({"amax_compute_algo": f"trimmed_max:{10**20}"}, "an integer K >= 0 and below"),
    ):
        with pytest.raises(PrecisionError, match=message):
            Recipe(**fields)  # type: ignore[arg-type]
