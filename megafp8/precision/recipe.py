"""From the precision section to the recipe that `numerics` works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megafp8.config.run import RunConfig

if TYPE_CHECKING:
    from megafp8.numerics.recipe import Recipe


def recipe_fields(config: RunConfig) -> dict[str, Any]:
    """Return the recipe as plain values, for the manifest and the dry run; {} without FP8."""
    precision = config.precision
    if not precision.fp8:
        return {}
    return {
        "name": precision.recipe_name,
        "margin": precision.fp8_margin,
        "amax_history_len": precision.fp8_amax_history_len,
        "amax_compute_algo": precision.fp8_amax_compute_algo,
        "amax_window": precision.fp8_amax_window,
        "nonfinite_amax": precision.fp8_nonfinite_amax,
        "weight_amax": precision.fp8_weight_amax,
        "reduce_amax": precision.fp8_reduce_amax,
        "forward_format": "e4m3",
        "gradient_format": "e4m3" if precision.fp8_format == "e4m3" else "e5m2",
        "fp8_wgrad": precision.fp8_wgrad,
    }


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
    return Recipe(
        margin=fields["margin"],
        amax_history_len=fields["amax_history_len"],
        amax_compute_algo=fields["amax_compute_algo"],
        nonfinite_amax=fields["nonfinite_amax"],
        weight_amax=fields["weight_amax"],
        forward_format=formats[fields["forward_format"]],
        gradient_format=formats[fields["gradient_format"]],
        fp8_wgrad=fields["fp8_wgrad"],
        name=fields["name"],
    )
