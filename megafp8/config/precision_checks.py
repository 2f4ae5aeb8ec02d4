"""Checks of the precision section, with what follows from the others.

Flags of FP8 that nothing would read are refused, since a run would go on without what they ask for.
`--fp8-format none` is another matter: it turns off a preset's FP8 and all that belongs to it, so
that a control run may keep every other flag. So does `--precision auto` on a device without FP8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from megafp8.config.messages import flag_name
from megafp8.config.recipes import STATE_FIELDS, recipes_that
from megafp8.config.transformer_engine import attention_refusals, transformer_engine_refusal

if TYPE_CHECKING:
    from megafp8.config.precision import PrecisionConfig
    from megafp8.config.sections import Sections

# The policy file is not among them: a run without FP8 reads it too, so that all tracks of a
# comparison refuse the same mistakes. `fp8_emulate` is a permission, which asks for nothing.
FP8_ONLY = (
    *STATE_FIELDS,
    *(
        "fp8_recipe fp8_power_of_2_scales fp8_fake_quant fp8_param_gather first_last_layers_bf16 "
        "fp8_wgrad fp8_tp_comm fp8_attention fp8_grad_reduce fp8_grad_error_feedback fp8_kernels"
    ).split(),
)


def precision_problems(config: Sections) -> Iterator[str]:
    """Yield one sentence for each contradiction around the precision section."""
    yield from _precision(config)
    yield from _fp8_wires(config)


def _precision(config: Sections) -> Iterator[str]:
    precision = config.precision
    if precision.precision == "auto":
        yield from _auto_contradictions(config)
        yield from _idle_flags(precision)
        return  # the rest is checked when a device has decided (config.auto_precision)
    if config.model.transformer_impl == "transformer_engine":
        refusal = transformer_engine_refusal(config)
        if refusal is not None:
            yield f"--transformer-impl transformer_engine: {refusal}"
    yield from attention_refusals(config)
    if precision.bf16 and precision.fp16:
        yield "--bf16 contradicts --fp16; give one of the two (--no-bf16 drops a preset's)"
    if precision.fp8 and precision.fp16:
        yield f"--fp8-format {precision.fp8_format} contradicts --fp16: FP8 needs --bf16; drop one"
    if precision.fp8 and not precision.bf16:
        yield f"--fp8-format {precision.fp8_format} needs --bf16; --fp8-format none drops FP8"
    if precision.fp8 and not precision.fp8_reduce_amax:
        if config.parallel.sequence_parallel and precision.fp8_tp_comm != "none":
            yield (
                "--no-fp8-reduce-amax gives tensor-parallel ranks different scales, but codes that "
                "--sequence-parallel gathers over them are decoded with one; found --fp8-tp-comm "
                f"{precision.fp8_tp_comm}, allowed with both: none"
            )
    yield from _recipe(config)
    if precision.loss_scale is not None and not precision.fp16:
        yield f"--loss-scale {precision.loss_scale:g} needs --fp16; bf16 and fp32 have none"
    if precision.first_last_layers_bf16:
        start = precision.num_layers_at_start_in_bf16
        end = precision.num_layers_at_end_in_bf16
        if start + end > config.model.num_layers:
            yield (
                f"num_layers_at_start_in_bf16 {start} + num_layers_at_end_in_bf16 {end} > "
                f"num_layers {config.model.num_layers}"
            )
    yield from _idle_flags(precision)


def _auto_contradictions(config: Sections) -> Iterator[str]:
    precision = config.precision
    given = {
        "--bf16": precision.bf16,
        "--fp16": precision.fp16,
        f"--fp8-format {precision.fp8_format}": precision.fp8_format is not None,
        f"--fp8-recipe {precision.fp8_recipe}": "fp8_recipe" in precision.model_fields_set
        and precision.fp8_recipe != "auto",
    }
    for flag, found in given.items():
        if found:
            yield f"--precision auto contradicts {flag}: it chooses itself; drop one of the two"


def _recipe(config: Sections) -> Iterator[str]:
    """Flags that the chosen recipe has no use for: refused, never ignored."""
    precision = config.precision
    recipe = precision.recipe
    if recipe.e8m0 and precision.fp8_power_of_2_scales is False:
        yield (
            f"--no-fp8-power-of-2-scales contradicts --fp8-recipe {recipe.name}, whose scales are "
            "stored as exponents (E8M0)"
        )
    if recipe.wgrad_in_fp8 is not None and not precision.fp8_wgrad:
        yield (
            f"--no-fp8-wgrad is what --fp8-recipe {recipe.name} means; drop it, or give "
            f"--fp8-recipe {recipe.wgrad_in_fp8}"
        )
    pp = config.parallel.pipeline_model_parallel_size
    if precision.fp8_amax_window == "micro-batch" and recipe.stateful and pp > 1:
        yield (
            "--fp8-amax-window micro-batch needs --pipeline-model-parallel-size 1, found "
            f"{pp}: a schedule runs forwards of later micro-batches before the backward of an "
            "earlier one, so scales can only move between steps; allowed: step"
        )
    for field in recipe.unused_fields:
        value, default = getattr(precision, field), type(precision).model_fields[field].default
        if value != default:
            yield (
                f"{_spelled(field, value)} is for --fp8-recipe "
                f"{recipes_that(lambda spec: spec.stateful)}; {recipe.name} finds "
                "its scales in each tensor and keeps none"
            )


def _fp8_wires(config: Sections) -> Iterator[str]:
    """FP8 on the wire."""
    precision = config.precision
    if precision.fp8_grad_error_feedback and not precision.fp8_grad_reduce:
        yield "--fp8-grad-error-feedback needs --fp8-grad-reduce, whose losses it carries over"
    if not (precision.fp8 and precision.fp8_param_gather):
        return
    if precision.fp8_weight_amax == "cast":
        yield (
            "--fp8-param-gather contradicts --fp8-weight-amax cast: shards are cast before they "
            "are gathered, so their common scale has to be known by then; allowed: updated"
        )
    if precision.fp8_amax_window == "micro-batch":
        yield (
            "--fp8-param-gather contradicts --fp8-amax-window micro-batch, which moves scales "
            "while gathered codes wait to be decoded with them; allowed: step"
        )
    if not precision.recipe.per_tensor:
        yield (
            f"--fp8-param-gather does not work with --fp8-recipe {precision.recipe.name}: the "
            "shards of a weight are cast apart, and its rows, columns or blocks span them; "
            f"allowed: {recipes_that(lambda spec: spec.per_tensor)}"
        )


def _idle_flags(precision: PrecisionConfig) -> Iterator[str]:
    """Yield a sentence for each flag that has no effect and was not turned off by name."""
    if _undecided(precision):
        for name in FP8_ONLY:
            if _given(precision, name):
                yield _needs_fp8(precision, name)
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if _given(precision, name) and not precision.first_last_layers_bf16:
            yield (
                f"{_spelled(name, getattr(precision, name))} needs --first-last-layers-bf16, which "
                "keeps those layers in BF16"
            )


def idle_defaults(precision: PrecisionConfig, named: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each flag that asks for FP8 with its default value.

    Args:
        precision: The run's.
        named: Fields that are on the command line. A file may hold a run's configuration whole.
    """
    for name in named:
        value = getattr(precision, name)
        asks = not isinstance(value, bool) and value not in (None, "none")
        if _undecided(precision) and name in FP8_ONLY and asks:
            yield _needs_fp8(precision, name)


def _undecided(precision: PrecisionConfig) -> bool:
    return precision.fp8_format is None and precision.precision is None


def _needs_fp8(precision: PrecisionConfig, name: str) -> str:
    return (
        f"{_spelled(name, getattr(precision, name))} needs --fp8-format hybrid or e4m3, found "
        "neither; --fp8-format none keeps FP8 off and leaves such flags out"
    )


def _given(precision: PrecisionConfig, name: str) -> bool:
    return getattr(precision, name) != type(precision).model_fields[name].default


def _spelled(name: str, value: Any) -> str:
    """A flag as it was given."""
    if isinstance(value, bool):
        return flag_name(name) if value else flag_name(f"no_{name}")
    return f"{flag_name(name)} {value}"
