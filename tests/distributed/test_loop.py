"""What the loop feeds to a step, by position: samples, dropout streams, rates, validation."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from megafp8.data.loader import BatchLoader, build_datasets
from megafp8.evaluation import validation_loss
from tests.support.layouts import PARITY, PRECISIONS, Curve, degrees, start_training
from tests.support.ranks import Ranks

SMALL = (*PARITY, *PRECISIONS["bf16"], *degrees(), "--num-layers", "1")
RAMP = (
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--rampup-batch-size", "4", "4", "8"),
    *("--lr-decay-style", "linear", "--lr-decay-iters", "8", "--lr-warmup-iters", "2"),
)


@dataclass
class Fed:
    """What the steps of one rank were given."""

    tokens: list[np.ndarray]
    seeds: list[int]
    rates: list[float]
    curve: Curve


def fed_to_steps(iterations: int) -> Fed:
    training, fed = start_training((*SMALL, *RAMP)), Fed([], [], [], Curve())
    original = training.step.run

    def note(micro_batches: Any, rate: float, iteration: int) -> Any:
        assert iteration == training.state.iteration + 1
        consumed = 2 * sum(map(len, fed.tokens))  # of two ranks
        assert rate == training.loop.schedule.learning_rate(consumed)
        fed.tokens.append(np.concatenate([batch["tokens"].numpy() for batch in micro_batches]))
        fed.seeds += [int(batch["seed"]) for batch in micro_batches]
        fed.rates.append(rate)
        return original(micro_batches, rate, iteration)

    with mock.patch.object(training.step, "run", note):
        fed.curve = training.iterate(iterations)
    assert training.state.consumed_samples == sum(fed.curve.batch_sizes)
    return fed


def test_each_sample_and_dropout_stream_is_used_once(ranks: Ranks) -> None:
    """Two ranks and a batch that grows: 4 samples an iteration, then 8."""
    found = ranks.run(fed_to_steps, world_size=2, iterations=5)
    sizes = [sum(len(rank.tokens[i]) for rank in found) for i in range(5)]
    assert sizes == found[0].curve.batch_sizes == [4, 4, 8, 8, 8]
    split, position = ranks.run(training_split, world_size=1, samples=sum(sizes))[0], 0
    for iteration, size in enumerate(sizes):
        used = np.concatenate([rank.tokens[iteration] for rank in found])
        wanted = split[position : position + size]
        assert sorted(map(tuple, used)) == sorted(map(tuple, wanted)), iteration
        position += size
    seeds = [seed for rank in found for seed in rank.seeds]
    assert len(set(seeds)) == len(seeds) == sum(sizes)
    assert found[0].rates == found[0].curve.learning_rates == found[1].rates
    assert len(set(found[0].rates)) == 5


def training_split(samples: int) -> np.ndarray:
    train = start_training(SMALL).loop.datasets.train
    return np.stack([train[index]["tokens"] for index in range(samples)])


def evaluated() -> tuple[list[float | None], list[float | None]]:
    """The loop's validation losses, and those of the splits valid and train after the last step."""
    flags = (*SMALL, "--eval-interval", "2", "--eval-iters", "2", "--train-iters", "5")
    training = start_training(flags)
    curve, datasets = training.iterate(4), build_datasets(training.config)
    assert datasets.valid is not None
    loaders = [BatchLoader(split, 64, 2) for split in (datasets.valid, datasets.train)]
    by_hand = [validation_loss(training.model, it, training.mesh, 2, 16) for it in loaders]
    return curve.valid_losses, by_hand


def test_validation_reads_the_validation_split_when_it_is_due(ranks: Ranks) -> None:
    losses, (valid, train) = ranks.run(evaluated, world_size=1)[0]
    assert [loss is not None for loss in losses] == [False, True, False, True]
    assert losses[3] == valid != train
