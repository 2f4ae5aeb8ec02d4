"""What TransformerEngine's layers cannot do, in sentences; arithmetic on flags alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megafp8.config.recipes import recipes_that

if TYPE_CHECKING:
    from megafp8.config.sections import Sections


def transformer_engine_refusal(config: Sections) -> str | None:
    """Return why a configuration cannot run on TransformerEngine, or None."""
    precision, parallel, recipe = config.precision, config.parallel, config.precision.recipe
    if not precision.fp8:
        return None
    if recipe.transformer_engine is None:
        known = recipes_that(lambda spec: spec.transformer_engine)
        return (
            f"--fp8-recipe {recipe.name}: TransformerEngine has no scales by {recipe.unit}; "
            f"allowed with it: {known}"
        )
    if precision.fp8_fake_quant:
        return "--fp8-fake-quant: TransformerEngine multiplies in FP8; use native"
    if precision.fp8_param_gather and not recipe.stateful:
        known = recipes_that(lambda spec: spec.transformer_engine and spec.stateful)
        return (
            f"--fp8-param-gather with --fp8-recipe {recipe.name}: TransformerEngine "
            f"finds the scales of this recipe in each weight itself; allowed with it: {known}"
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


def attention_refusals(config: Sections) -> Iterator[str]:
    """Yield a sentence for each contradiction around the attention core."""
    model, precision = config.model, config.precision
    backend, impl = model.attention_backend, model.transformer_impl
    te_core = backend in ("flash", "fused", "unfused")
    if te_core and impl != "transformer_engine":
        yield (
            f"--attention-backend {backend} is a core of TransformerEngine's and needs "
            f"--transformer-impl transformer_engine, found {impl}; allowed with it: auto, local"
        )
    if backend in ("flash", "fused") and precision.compute_dtype == "fp32":
        yield (
            f"--attention-backend {backend} computes in 16 bits and needs --bf16 or --fp16; "
            "allowed in fp32: auto, unfused, local"
        )
    if precision.fp8_attention != "none":
        yield from _fp8_attention_refusals(config)


def _fp8_attention_refusals(config: Sections) -> Iterator[str]:
    model, precision, recipe = config.model, config.precision, config.precision.recipe
    asked = f"--fp8-attention {precision.fp8_attention}"
    if precision.fp8_attention == "mha":
        yield (
            f"{asked} lets linear_qkv hand on FP8, which TransformerEngine does inside its "
            "MultiheadAttention alone and without rope; here projection and core are modules of "
            "their own; allowed: none, dpa"
        )
        return
    if model.transformer_impl != "transformer_engine":
        yield (
            f"{asked} needs --transformer-impl transformer_engine, found "
            f"{model.transformer_impl}: the native core has no FP8; allowed with it: none"
        )
    if not precision.fp8:
        yield f"{asked} needs --fp8-format hybrid or e4m3: it shares the linears' recipe"
    elif recipe.transformer_engine is None or not recipe.transformer_engine.attention:
        yield (
            f"{asked} needs --fp8-recipe delayed, found {recipe.name}: on Hopper cuDNN "
            "has FP8 attention for delayed scaling alone"
        )
    if model.attention_backend not in ("auto", "fused"):
        yield (
            f"{asked} contradicts --attention-backend {model.attention_backend}: FP8 attention is "
            "cuDNN's fused one; allowed with it: auto, fused"
        )
