"""Learning-rate schedules, numerically those of Megatron's `OptimizerParamScheduler`.

The rate is a pure function of the samples consumed before an iteration, so it has no state to save
and a resumed run cannot drift. A decay over the whole run ends where the run ends, counted from the
position that was loaded: with another batch size it ends elsewhere. Lengths given in iterations
count `iterations * global_batch_size` samples, as in Megatron, and so a batch-size ramp stretches
the warm-up over more iterations, not over more samples.

Two rules that the reader of a run should know:

- The optimizer step of an iteration uses the rate at the position *before* it. With a warm-up the
  very first step therefore has rate 0, as in Megatron.
- A skipped step (non-finite gradient) consumes its samples and so advances the schedule. Megatron
  holds the schedule still instead; then the rate depends on the history of the run and two runs at
  the same position differ, which a comparison of runs cannot have.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megafp8.errors import ConfigurationError
from megafp8.train.batch_size import START, BatchSizeSchedule, Position, run_end

if TYPE_CHECKING:
    from megafp8.config import RunConfig

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@dataclass(frozen=True)
class LearningRateSchedule:
    """Learning rate over consumed samples.

    Attributes:
        max_lr: Rate at the end of the warm-up.
        min_lr: Rate from the end of the decay on.
        warmup_samples: Samples of linear warm-up from 0; a fraction of the decay need not be whole.
        decay_samples: Position at which the decay, warm-up included, has ended.
        decay_style: One of `DECAY_STYLES`.
        wsd_decay_samples: Length of WSD's final decay; None for the other styles.
        wsd_decay_style: One of `WSD_DECAY_STYLES`.
    """

    max_lr: float
    min_lr: float
    warmup_samples: float
    decay_samples: int
    decay_style: str
    wsd_decay_samples: int | None = None
    wsd_decay_style: str = "exponential"

    def __post_init__(self) -> None:
        if self.decay_style not in DECAY_STYLES:
            raise ConfigurationError(
                f"--lr-decay-style {self.decay_style}: allowed are {', '.join(DECAY_STYLES)}"
            )
        if not 0.0 <= self.min_lr <= self.max_lr:
            raise ConfigurationError(
                f"--min-lr {self.min_lr:g}: must lie between 0 and --lr {self.max_lr:g}"
            )
        if not 0 <= self.warmup_samples < self.decay_samples:
            raise ConfigurationError(
                f"learning-rate warm-up of {self.warmup_samples:g} samples must be shorter than "
                f"the decay of {self.decay_samples} samples (--lr-warmup-iters or "
                "--lr-warmup-fraction against --lr-decay-iters or the length of the run)"
            )
        if self.decay_style == "WSD":
            self._check_wsd()

    def _check_wsd(self) -> None:
        if self.wsd_decay_samples is None:
            raise ConfigurationError("--lr-decay-style WSD needs --lr-wsd-decay-iters")
        if self.wsd_decay_style not in WSD_DECAY_STYLES:
            raise ConfigurationError(
                f"--lr-wsd-decay-style {self.wsd_decay_style}: allowed are "
                f"{', '.join(WSD_DECAY_STYLES)}"
            )
        # Megatron accepts a final decay that reaches back into the warm-up; the rate then jumps
        # down where the warm-up ends.
        room = self.decay_samples - self.warmup_samples
        if not 0 < self.wsd_decay_samples <= room:
            raise ConfigurationError(
                f"--lr-wsd-decay-iters: the final decay of {self.wsd_decay_samples} samples must "
                f"be positive and fit between warm-up and end of decay ({room:g} samples)"
            )

    @classmethod
    def from_config(
        cls, config: RunConfig, batches: BatchSizeSchedule, start: Position = START
    ) -> LearningRateSchedule:
        """Build the schedule of a run.

        Without `lr_decay_iters` the decay ends with the run. `lr_warmup_fraction`, where given,
        is a fraction of the decay and wins over `lr_warmup_iters`.

        Args:
            config: The run.
            batches: Its batch sizes, which turn iterations into samples.
            start: Where it starts or goes on.

        Raises:
            ConfigurationError: Lengths that contradict each other, or an unknown style.
        """
        optimizer = config.optimizer
        size = batches.global_batch_size
        if optimizer.lr_decay_iters is not None:
            decay = optimizer.lr_decay_iters * size
        else:
            decay = _run_samples(config, batches, start)
        if optimizer.lr_warmup_fraction is not None:
            warmup: float = optimizer.lr_warmup_fraction * decay
        else:
            warmup = optimizer.lr_warmup_iters * size
        wsd = optimizer.lr_wsd_decay_iters
        return cls(
            max_lr=float(optimizer.lr),
            min_lr=float(optimizer.min_lr),
            warmup_samples=warmup,
            decay_samples=decay,
            decay_style=optimizer.lr_decay_style,
            wsd_decay_samples=None if wsd is None else wsd * size,
            wsd_decay_style=optimizer.lr_wsd_decay_style,
        )

    def learning_rate(self, consumed_samples: int) -> float:
        """Return the rate of the step taken after `consumed_samples` samples.

        Cases, in the order in which they are tried: warm-up (its last position included), constant
        style, past the decay (`min_lr`), inverse square root (never below `min_lr`), and a decay
        from `max_lr` to `min_lr` by the style's coefficient.
        """
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.max_lr * float(consumed_samples) / float(self.warmup_samples)
        if self.decay_style == "constant":
            return self.max_lr
        if consumed_samples > self.decay_samples:
            return self.min_lr
        if self.decay_style == "inverse-square-root":
            warmup, position = max(self.warmup_samples, 1), max(consumed_samples, 1)
            return max(self.min_lr, self.max_lr * warmup**0.5 / position**0.5)
        return self.min_lr + self._coefficient(consumed_samples) * (self.max_lr - self.min_lr)

    def _coefficient(self, consumed_samples: int) -> float:
        """Return the share of the way from `min_lr` up to `max_lr`."""
        if self.decay_style == "WSD":
            assert self.wsd_decay_samples is not None
            done = consumed_samples - (self.decay_samples - self.wsd_decay_samples)
            if done <= 0:
                return 1.0
            return _decay(self.wsd_decay_style, float(done) / float(self.wsd_decay_samples))
        done = consumed_samples - self.warmup_samples
        return _decay(
            self.decay_style, float(done) / float(self.decay_samples - self.warmup_samples)
        )


def _decay(style: str, ratio: float) -> float:
    """Map the share of the decay that is done, in [0, 1], to a coefficient from 1 down to 0."""
    if style == "linear":
        return 1.0 - ratio
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "exponential":
        return 2.0 * math.pow(0.5, ratio) - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(ratio)


def _run_samples(config: RunConfig, batches: BatchSizeSchedule, start: Position) -> int:
    """Return the samples of the whole run.

    With a ramp and `train_iters` this is less than `train_iters * global_batch_size`: the decay
    ends where the run ends. Megatron refuses that combination, so there is no other value to match.
    """
    if config.training.train_samples is not None:
        return config.training.train_samples
    end = run_end(config, batches, start)
    # Where nothing is left to do no rate is asked for, and the flags are judged as a new run's.
    return (run_end(config, batches) if end == start else end).consumed_samples
