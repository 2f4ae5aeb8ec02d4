"""What TransformerEngine's layers cannot do, in sentences; arithmetic on flags alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megafp8.config.run import RunConfig


# TransformerEngine's names are DelayedScaling, Float8CurrentScaling, Float8BlockScaling and
# MXFP8BlockScaling.
TE_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")


def transformer_engine_refusal(config: RunConfig) -> str | None:
    """Return why a configuration cannot run on TransformerEngine, or None."""
    precision, parallel = config.precision, config.parallel
    if parallel.schedule == "zbv":
        return (
            "--pipeline-schedule zbv splits the backward pass, which TransformerEngine's linears "
            "do here in one; allowed with it: 1f1b, interleaved, gpipe"
        )
    if not precision.fp8:
        return None
    if precision.recipe_name not in TE_RECIPES:
        return (
            f"--fp8-recipe {precision.fp8_recipe}: TransformerEngine has no scales by row; allowed "
            f"with it: {', '.join(TE_RECIPES)}"
        )
    if precision.fp8_fake_quant:
        return "--fp8-fake-quant: TransformerEngine multiplies in FP8; use native"
    if precision.fp8_param_gather:
        return (
            "--fp8-param-gather: TransformerEngine's layers take weights in BF16 here and cast "
            "them; leave it out or use native"
        )
    if precision.fp8_tp_comm == "all" and parallel.sequence_parallel:
        return (
            "--fp8-tp-comm all: TransformerEngine reduces in BF16; allowed with "
            "--sequence-parallel: all-gather"
        )
    if not precision.fp8_wgrad:
        return (
            "--no-fp8-wgrad: TransformerEngine has no weight gradient in high precision beside an "
            "FP8 input gradient; leave it out or use native"
        )
    if precision.fp8_tp_comm == "none" and parallel.sequence_parallel:
        return (
            "--fp8-tp-comm none: TransformerEngine gathers FP8 operands as FP8; allowed with "
            "--sequence-parallel: all-gather"
        )
    return None
