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


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("delayed", 0), ("tensorwise", 0), ("rowwise", 32), ("blockwise", 128), ("mxfp8", 128)],
)
def test_bytes_of_scales(name, wanted) -> None:
    assert RECIPES[name].scale_bytes(4096, 512) == wanted


def test_messages_name_the_recipes_with_a_property() -> None:
    assert recipes_that(lambda spec: spec.per_row, " and ") == "rowwise and rowwise_with_gw_hp"


def test_properties_of_names() -> None:
    assert RECIPES["delayed"].stateful and not RECIPES["delayed"].unused_fields
    assert "fp8_margin" in RECIPES["tensorwise"].unused_fields
    for name, powers in (("tensorwise", False), ("blockwise", True), ("mxfp8", True)):
        assert RECIPES[name].power_of_2_scales == powers
    found = [RECIPES[name].unit for name in ("delayed", "rowwise", "mxfp8")]
    assert found == ["tensor", "row", "block of 32"]
