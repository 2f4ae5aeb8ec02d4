"""Batch-size ramp-up: how many samples an iteration takes, from the samples consumed before it.

`--rampup-batch-size START INCREMENT SAMPLES` grows the global batch from START to
`--global-batch-size` in equal steps over SAMPLES samples, as Megatron does. Everything here is a
pure function of the position in the data, so a resumed run needs no state of its own: a batch size,
a number of ranks or a ramp that is another than before counts from the position that was loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megafp8.config.layout import full_batch_size
from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config import RunConfig


@dataclass(frozen=True)
class Position:
    """How far a run is.

    Attributes:
        iteration: completed iterations.
        consumed_samples: samples that they took, over all ranks.
    """

    iteration: int = 0
    consumed_samples: int = 0

    def __str__(self) -> str:
        return f"iteration {self.iteration}, {self.consumed_samples} samples consumed"


START = Position()


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Global batch size over a run.

    Attributes:
        global_batch_size: Size after the ramp.
        start: Size at sample 0; equal to `global_batch_size` without a ramp.
        increment: Growth per step.
        ramp_samples: Samples over which the ramp is spread.
    """

    global_batch_size: int
    start: int
    increment: int
    ramp_samples: int

    @classmethod
    def constant(cls, global_batch_size: int) -> BatchSizeSchedule:
        """Return the schedule without a ramp."""
        return cls(global_batch_size, global_batch_size, 1, 0)

    @classmethod
    def from_config(cls, config: RunConfig, data_parallel_size: int) -> BatchSizeSchedule:
        """Read `global_batch_size` and `rampup_batch_size` of the training section.

        Args:
            config: The run. It was checked, and its layout with it, that the ramp ends at the
                global batch size and every size splits into whole micro-batches.
            data_parallel_size: Ranks that the batch is split over.
        """
        size = full_batch_size(config.training, data_parallel_size)
        if config.training.rampup_batch_size is None:
            return cls.constant(size)
        return cls(size, *config.training.rampup_batch_size)

    def batch_size(self, consumed_samples: int) -> int:
        """Return the size of the iteration that starts after `consumed_samples` samples.

        Megatron's rule, float arithmetic included: a step is `ramp_samples / steps` samples long,
        not rounded to whole samples, and the ramp's last position still goes through the division
        (it rounds down to one step less for e.g. 7 steps over 2122 samples).
        """
        if not self._ramping(consumed_samples):
            return self.global_batch_size
        steps = (self.global_batch_size - self.start) // self.increment
        return self.start + int(consumed_samples / (self.ramp_samples / steps)) * self.increment

    def consumed_after(self, iterations: int, consumed: int = 0) -> int:
        """Return the position in the data `iterations` iterations after `consumed` samples."""
        while iterations > 0 and self._ramping(consumed):
            consumed += self.batch_size(consumed)
            iterations -= 1
        return consumed + iterations * self.global_batch_size

    def iterations_within(self, samples: int, consumed: int = 0) -> int:
        """Return how many whole iterations fit between `consumed` samples and `samples`.

        A last batch that would be incomplete is dropped. Megatron does the same after the ramp; a
        budget that ends inside the ramp it overruns by up to one batch, which is not copied here
        because the data set holds `samples` samples and no more.
        """
        iterations = 0
        while self._ramping(consumed):
            consumed += self.batch_size(consumed)
            if consumed > samples:
                return iterations
            iterations += 1
        return iterations + max(0, samples - consumed) // self.global_batch_size

    def _ramping(self, consumed_samples: int) -> bool:
        """Say whether the ramp decides; a ramp over 0 samples or of 0 steps never does."""
        return 0 < self.ramp_samples >= consumed_samples and self.start < self.global_batch_size


def run_end(config: RunConfig, batches: BatchSizeSchedule, start: Position = START) -> Position:
    """Return where the run ends, from `train_iters` or `train_samples`.

    Args:
        config: The run.
        batches: Its batch sizes.
        start: Where it starts or goes on; what lies before may have had other batch sizes.

    Returns:
        The last iteration and the samples consumed by then; `start` if nothing is left to do.

    Raises:
        ConfigurationError: The samples of a new run do not fill one batch.
    """
    training, consumed = config.training, start.consumed_samples
    if training.train_iters is not None:
        iterations = max(0, training.train_iters - start.iteration)
    else:
        assert training.train_samples is not None, "checked by RunConfig"
        iterations = batches.iterations_within(training.train_samples, consumed)
        if iterations == 0 and start == START:
            raise ConfigurationError(
                f"{length_flag(config)}: less than one batch of {batches.batch_size(0)} samples"
            )
    return Position(start.iteration + iterations, batches.consumed_after(iterations, consumed))


def total_iterations(config: RunConfig, batches: BatchSizeSchedule, start: Position = START) -> int:
    """Return the last iteration of the run; arguments and errors as `run_end`'s."""
    return run_end(config, batches, start).iteration


def length_flag(config: RunConfig) -> str:
    """Return the flag that says how long the run is, with its value."""
    training = config.training
    if training.train_iters is not None:
        return f"--train-iters {training.train_iters}"
    return f"--train-samples {training.train_samples}"
