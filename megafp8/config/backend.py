"""What TransformerEngine's layers cannot do, in sentences; arithmetic on flags alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megafp8.config.run import RunConfig


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
    if precision.recipe_name != "delayed":
        return (
            f"--fp8-recipe {precision.recipe_name}: only delayed goes through TransformerEngine in "
            "this version; use native"
        )
    if precision.fp8_fake_quant:
        return "--fp8-fake-quant: TransformerEngine multiplies in FP8; use native"
    if not precision.fp8_wgrad:
        return (
            "--no-fp8-wgrad: TransformerEngine's delayed scaling has no weight gradient in high "
            "precision; leave it out or use native"
        )
    if precision.fp8_tp_comm == "none" and parallel.sequence_parallel:
        return (
            "--fp8-tp-comm none: TransformerEngine gathers FP8 operands as FP8; allowed with "
            "--sequence-parallel: all-gather"
        )
    return None
