"""The table of FP8 recipes: its rows agree with each other and with what GEMMs ask for."""

from typing import get_args

import pytest

from megafp8.config.recipes import GEMM_MULTIPLE, RECIPES, RecipeName, recipes_that

EACH = pytest.mark.parametrize("spec", RECIPES.values(), ids=RECIPES)


def test_every_name_has_a_row() -> None:
    assert get_args(RecipeName) == tuple(RECIPES)


@EACH
def test_rows_name_rows(spec) -> None:
    theirs = spec.transformer_engine
    named = [spec.wgrad_in_fp8, None if theirs is None else theirs.replaced_by]
    assert all(name in RECIPES and name != spec.name for name in named if name is not None)
    assert spec.power_of_2_scales or not spec.e8m0


@EACH
def test_what_a_size_has_to_be_fits_gemms_and_blocks(spec) -> None:
    assert spec.multiple % GEMM_MULTIPLE == 0
    for role in ("input", "weight", "grad_output"):
        for axis in ("features", "tokens"):
            assert all(spec.multiple % (size or 1) == 0 for size in spec.block(role, axis))


@pytest.mark.parametrize(
    ("name", "features", "tokens", "weight"),
    [
        ("delayed", (0, 0), (0, 0), (0, 0)),
        ("tensorwise", (0, 0), (0, 0), (0, 0)),
        ("rowwise", (1, 0), (0, 1), (0, 1)),
        ("rowwise_with_gw_hp", (1, 0), (0, 1), (0, 1)),
        ("blockwise", (1, 128), (128, 1), (128, 128)),
        ("mxfp8", (1, 32), (32, 1), (32, 1)),
    ],
)
def test_blocks_lie_along_what_is_summed_over(name, features, tokens, weight) -> None:
    spec = RECIPES[name]
    for role in ("input", "grad_output"):
        assert (spec.block(role, "features"), spec.block(role, "tokens")) == (features, tokens)
    assert spec.block("weight", "tokens") == weight
    assert spec.block("weight", "features") == (weight if spec.square_weights else features)


def test_bytes_of_scales() -> None:
    found = {name: spec.scale_bytes(4096, 512) for name, spec in RECIPES.items()}
    rows = {"rowwise": 32, "rowwise_with_gw_hp": 32}
    assert found == {"delayed": 0, "tensorwise": 0, **rows, "blockwise": 128, "mxfp8": 128}


def test_messages_name_the_recipes_with_a_property() -> None:
    assert recipes_that(lambda spec: spec.per_row) == "rowwise, rowwise_with_gw_hp"
    assert recipes_that(lambda spec: spec.block_length, " and ") == "blockwise and mxfp8"
