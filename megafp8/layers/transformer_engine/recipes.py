"""From this project's recipe to TE's, with names checked: TE ignores keywords it does not know."""

import dataclasses
from collections.abc import Callable
from typing import Any

from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    QParams,
    Recipe,
)

from megafp8.config.recipes import recipes_that
from megafp8.errors import PrecisionError
from megafp8.numerics import E4M3
from megafp8.numerics import Recipe as OurRecipe


def checked(recipe_class: type, **fields: Any) -> Any:
    """Construct a TE recipe.

    Raises:
        PrecisionError: a keyword that is no field of the class. TE's recipes are pydantic
            dataclasses that drop such a keyword without a word, `interval=` and typos alike.
    """
    known = {field.name for field in dataclasses.fields(recipe_class)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise PrecisionError(
            f"{recipe_class.__name__} has no field {', '.join(unknown)}; its fields are "
            f"{', '.join(sorted(known))}"
        )
    return recipe_class(**fields)


def te_recipe(recipe: OurRecipe, fp8_core: bool = False) -> Recipe:
    """TE's recipe of the same name and formats.

    Args:
        recipe: of the run.
        fp8_core: lets attention cores in an enabled autocast run in FP8.

    Raises:
        PrecisionError: a recipe that TE does not have, naming those that it has.
    """
    theirs = recipe.spec.transformer_engine
    if theirs is None:
        known = recipes_that(lambda spec: spec.transformer_engine)
        raise PrecisionError(f"TransformerEngine has no recipe {recipe.name!r}; allowed: {known}")
    assert recipe.forward_format == E4M3  # E5M2 x E5M2 has no GEMM
    fp8_format = Format.E4M3 if recipe.gradient_format == E4M3 else Format.HYBRID
    return _MAKERS[theirs.recipe](recipe, fp8_format, fp8_core)


def _delayed_scaling(recipe: OurRecipe, fp8_format: Format, fp8_core: bool) -> Recipe:
    """TE's delayed scaling.

    Windows, algorithms and margins stay with the scale registry, whose memory TE's quantizers read
    and write (see `registry_quantizers.py`): of TE's own history only the staging row is left, and
    `reduce_amax` says what holds, since the registry reduces. `fp8_core` lets attention cores in an
    enabled autocast run in FP8.
    """
    return checked(
        DelayedScaling,
        fp8_format=fp8_format,
        margin=0,
        amax_history_len=1,
        amax_compute_algo="most_recent",
        reduce_amax=True,
        fp8_dpa=fp8_core,
        fp8_mha=False,
        backward_override=None,
    )


def _current_scaling(recipe: OurRecipe, fp8_format: Format, fp8_core: bool) -> Recipe:
    """TE's per-tensor current scaling: a tensor's scale is 448 (or 57344) / its own amax."""
    made = checked(
        Float8CurrentScaling,
        use_power_2_scales=recipe.power_of_2_scales,
        fp8_format=fp8_format,
        fp8_gemm_fprop=MMParams(use_split_accumulator=False),
        fp8_gemm_dgrad=MMParams(use_split_accumulator=True),
        fp8_gemm_wgrad=MMParams(use_split_accumulator=True),
        fp8_dpa=fp8_core,
        fp8_mha=False,
        backward_override=None,
    )
    return _with_scales(made, recipe.power_of_2_scales)


def _block_scaling(recipe: OurRecipe, fp8_format: Format, fp8_core: bool) -> Recipe:
    """TE's block scaling: 1 x 128 for inputs and gradients, 128 x 128 for weights.

    It has no FP8 attention; TE refuses `fp8_core`.
    """
    made = checked(
        Float8BlockScaling,
        use_f32_scales=not recipe.power_of_2_scales,
        fp8_format=fp8_format,
        x_block_scaling_dim=1,
        w_block_scaling_dim=2,
        grad_block_scaling_dim=1,
        fp8_gemm_fprop=MMParams(use_split_accumulator=True),
        fp8_gemm_dgrad=MMParams(use_split_accumulator=True),
        fp8_gemm_wgrad=MMParams(use_split_accumulator=True),
        fp8_dpa=fp8_core,
        fp8_mha=False,
        backward_override=None,
    )
    return _with_scales(made, recipe.power_of_2_scales)


def _mxfp8(recipe: OurRecipe, fp8_format: Format, fp8_core: bool) -> Recipe:
    """TE's MXFP8: an E8M0 scale for each 1 x 32 values, so powers of two by definition."""
    return checked(
        MXFP8BlockScaling,
        margin=0,
        fp8_format=fp8_format,
        fp8_dpa=fp8_core,
        fp8_mha=False,
        backward_override=None,
        enable_2d_quantization=False,
    )


def _with_scales(made: Any, power_of_2: bool) -> Recipe:
    """Say of each tensor whether its scales are powers of two, and that amaxes have no floor.

    TE's fields of that name set nothing: the parameters its quantizers read are class attributes,
    made from the environment when TE is imported. On the instance they are this run's.
    """
    params = QParams(power_2_scale=power_of_2, amax_epsilon=0.0)
    made.fp8_quant_fwd_inp = params
    made.fp8_quant_fwd_weight = params
    made.fp8_quant_bwd_grad = params
    return made


_MAKERS: dict[str, Callable[[OurRecipe, Format, bool], Recipe]] = {
    "DelayedScaling": _delayed_scaling,
    "Float8CurrentScaling": _current_scaling,
    "Float8BlockScaling": _block_scaling,
    "MXFP8BlockScaling": _mxfp8,
}
