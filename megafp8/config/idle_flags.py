"""Flags of FP8 that nothing would read: refused, since a run would go on without what they ask for.

`--fp8-format none` is another matter: it turns off a preset's FP8 and all that belongs to it, so
that a control run may keep every other flag. So does `--precision auto` on a device without FP8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megafp8.config.precision import PrecisionConfig

# The policy file is not among them: a run without FP8 reads it too, so that all tracks of a
# comparison refuse the same mistakes. `fp8_emulate` is a permission, which asks for nothing.
FP8_ONLY = tuple(
    (
        "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_scale_cap "
        "fp8_power_of_2_scales fp8_fake_quant fp8_param_gather first_last_layers_bf16 fp8_wgrad "
        "fp8_reduce_amax fp8_amax_window fp8_nonfinite_amax fp8_weight_amax fp8_tp_comm "
        "fp8_attention fp8_grad_reduce fp8_grad_error_feedback fp8_kernels"
    ).split()
)


def idle_flags(precision: PrecisionConfig) -> Iterator[str]:
    """Yield a sentence for each flag that has no effect and was not turned off by name."""
    if _undecided(precision):
        for name in FP8_ONLY:
            if _given(precision, name):
                yield _needs_fp8(precision, name)
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if _given(precision, name) and not precision.first_last_layers_bf16:
            yield (
                f"{spelled(name, getattr(precision, name))} needs --first-last-layers-bf16, which "
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
        f"{spelled(name, getattr(precision, name))} needs --fp8-format hybrid or e4m3, found "
        "neither; --fp8-format none keeps FP8 off and leaves such flags out"
    )


def _given(precision: PrecisionConfig, name: str) -> bool:
    return getattr(precision, name) != type(precision).model_fields[name].default


def spelled(name: str, value: Any) -> str:
    """A flag as it was given."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"
