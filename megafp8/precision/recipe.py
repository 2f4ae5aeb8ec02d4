"""From the precision section to the recipe that `numerics` works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megafp8.config.run_config import RunConfig

if TYPE_CHECKING:
    from megafp8.numerics.recipe import Recipe


def recipe_fields(config: RunConfig) -> dict[str, Any]:
    """Return the recipe as plain values, for the manifest and the dry run; {} without FP8."""
    precision = config.precision
    if not precision.fp8:
        return {}
    fields: dict[str, Any] = {
        "name": precision.recipe.name,
        "forward_format": "e4m3",
        "gradient_format": "e4m3" if precision.fp8_format == "e4m3" else "e5m2",
        "power_of_2_scales": precision.power_of_2_scales,
        "fp8_wgrad": high_precision_wgrad(config) is None,
        "fake_quant": precision.fp8_fake_quant,
    }
    if precision.recipe.stateful:
        fields |= {
            "margin": precision.fp8_margin,
            "amax_history_len": precision.fp8_amax_history_len,
            "amax_compute_algo": precision.fp8_amax_compute_algo,
            "scale_cap": precision.fp8_scale_cap,
            "amax_window": precision.fp8_amax_window,
            "nonfinite_amax": precision.fp8_nonfinite_amax,
            "weight_amax": precision.fp8_weight_amax,
            "reduce_amax": precision.fp8_reduce_amax,
        }
    return fields


def high_precision_wgrad(config: RunConfig) -> str | None:
    """Return why weight gradients of FP8 linears come from high-precision operands, or None."""
    precision, recipe = config.precision, config.precision.recipe
    if not precision.fp8_wgrad:
        return "--no-fp8-wgrad"
    if recipe.wgrad_in_fp8 is not None:
        return f"--fp8-recipe {recipe.name}"
    if recipe.per_row and config.parallel.sequence_parallel:
        return (
            f"--fp8-recipe {recipe.name} with --sequence-parallel: columns of a gathered operand, "
            "which the weight gradient scales, span ranks"
        )
    return None


def recipe_from_config(config: RunConfig) -> Recipe | None:
    """Return the recipe of a run; None without FP8.

    Raises:
        PrecisionError: A value that the recipe does not take.
    """
    # Imported here: numerics needs torch, and a dry run or a refused flag must not wait for it.
    from megafp8.numerics.formats import E4M3, E5M2
    from megafp8.numerics.recipe import Recipe

    fields = recipe_fields(config)
    if not fields:
        return None
    formats = {"e4m3": E4M3, "e5m2": E5M2}
    for name in ("forward_format", "gradient_format"):
        fields[name] = formats[fields[name]]
    for name in ("amax_window", "reduce_amax"):  # not numerics: the training step's business
        fields.pop(name, None)
    return Recipe(**fields)
