"""The loss scale of FP16 training, with the rules of Megatron's gradient scalers.

Plain numbers, no tensors: the decision whether a step overflowed is one host value for all ranks
anyway, and Python floats hold every power of two that a scale can take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.precision import PrecisionConfig

GROWTH_FACTOR = 2.0
BACKOFF_FACTOR = 0.5


class LossScaler(Protocol):
    """What the training step needs of a loss scale."""

    @property
    def scale(self) -> float:
        """The factor on the loss now."""
        ...

    @property
    def can_back_off(self) -> bool:
        """Whether an overflow may yet be cured by a smaller scale."""
        ...

    def update(self, found_nonfinite: bool) -> None:
        """Learn whether this iteration's gradients, over all ranks, had a non-finite value."""
        ...

    def state_dict(self) -> dict[str, float]:
        """Return what a resumed run needs."""
        ...

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` gave."""
        ...


class ConstantLossScaler:
    """A scale that never changes; 1.0 is no scaling."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = float(scale)

    @property
    def scale(self) -> float:
        """The factor on the loss."""
        return self._scale

    @property
    def can_back_off(self) -> bool:
        """Never: the scale stays."""
        return False

    def update(self, found_nonfinite: bool) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """Return an empty state: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Accept any state, also that of a dynamic scale which the user has now fixed."""


class DynamicLossScaler:
    """A scale that halves after overflows and doubles after quiet stretches.

    Cases, in Megatron's arithmetic:

    - overflow: the quiet stretch starts over and the hysteresis drops by one; while it is at or
      below zero each overflow halves the scale, never below `min_scale`;
    - `window` iterations in a row without overflow: the scale doubles and the hysteresis is full
      again (it is not refilled by anything else, halving included).
    """

    def __init__(
        self, initial_scale: float, min_scale: float, window: int, hysteresis: int
    ) -> None:
        if not 0.0 < min_scale <= initial_scale:
            raise ConfigurationError(
                f"--min-loss-scale {min_scale:g}: must be positive and at most "
                f"--initial-loss-scale {initial_scale:g}"
            )
        if window < 1 or hysteresis < 1:
            raise ConfigurationError(
                f"--loss-scale-window {window} and --hysteresis {hysteresis}: must be positive"
            )
        self._scale = float(initial_scale)
        self.min_scale = float(min_scale)
        self.window = window
        self.hysteresis = hysteresis
        self._quiet = 0
        self._hysteresis_left = hysteresis

    @property
    def scale(self) -> float:
        """The factor on the loss now."""
        return self._scale

    @property
    def can_back_off(self) -> bool:
        """Whether the scale is above its minimum."""
        return self._scale > self.min_scale

    def update(self, found_nonfinite: bool) -> None:
        """Learn whether this iteration's gradients, over all ranks, had a non-finite value."""
        if found_nonfinite:
            self._quiet = 0
            self._hysteresis_left -= 1
            if self._hysteresis_left <= 0:
                self._scale = max(self._scale * BACKOFF_FACTOR, self.min_scale)
            return
        self._quiet += 1
        if self._quiet == self.window:
            self._quiet = 0
            self._hysteresis_left = self.hysteresis
            self._scale *= GROWTH_FACTOR

    def state_dict(self) -> dict[str, float]:
        """Return the scale and both counters, under Megatron's names."""
        return {
            "scale": self._scale,
            "growth_tracker": self._quiet,
            "hysteresis_tracker": self._hysteresis_left,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a state; an empty one, from a run without scaling, leaves the start values."""
        if not state:
            return
        self._scale = float(state["scale"])
        self._quiet = int(state["growth_tracker"])
        self._hysteresis_left = int(state["hysteresis_tracker"])


def build_loss_scaler(config: PrecisionConfig) -> LossScaler:
    """Return the scaler of a run.

    Args:
        config: Section `precision`. FP16 without `loss_scale` is dynamic, with it constant; all
            other precisions have no scale (1.0).
    """
    if not config.fp16:
        return ConstantLossScaler()
    if config.loss_scale is not None:
        return ConstantLossScaler(config.loss_scale)
    return DynamicLossScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
