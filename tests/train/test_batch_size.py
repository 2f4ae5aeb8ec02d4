"""Batch-size ramp-up against values of Megatron's micro-batch calculator (megatron-core 0.16.1)."""

from types import SimpleNamespace

import pytest

from megafp8.config.training import TrainingConfig
from megafp8.errors import ConfigurationError
from megafp8.train.batch_size import BatchSizeSchedule, Position, run_end, total_iterations

RAMP = BatchSizeSchedule(global_batch_size=64, start=16, increment=16, ramp_samples=300)


def run(**training):
    values = {"micro_batch_size": 2, "global_batch_size": 64, "rampup_batch_size": (16, 16, 300)}
    return SimpleNamespace(training=TrainingConfig(**{**values, **training}))


def test_sizes_equal_megatrons():
    positions = (0, 99, 100, 200, 300, 400)
    assert [RAMP.batch_size(p) for p in positions] == [16, 16, 32, 48, 64, 64]


def test_float_division_at_the_end_of_the_ramp_is_megatrons():
    # 2122 / 7 rounds up, so the calculator still gives the step before the last at the end itself.
    ramp = BatchSizeSchedule(56, 28, 4, 2122)
    assert [ramp.batch_size(p) for p in (2121, 2122, 2123)] == [52, 52, 56]


def test_without_a_ramp_the_size_is_constant():
    for same in (
        BatchSizeSchedule.constant(8),
        BatchSizeSchedule(8, 8, 4, 100),  # Megatron divides by zero here
        BatchSizeSchedule(8, 4, 4, 0),  # and here
    ):
        assert {same.batch_size(p) for p in (0, 50, 100, 101)} == {8}
        assert same.consumed_after(5) == 40
        assert same.iterations_within(47) == 5


def test_consumed_samples_and_iterations_agree_with_stepping():
    consumed, positions = 0, [0]
    for _ in range(60):
        consumed += RAMP.batch_size(consumed)
        positions.append(consumed)
    assert [RAMP.consumed_after(n) for n in range(61)] == positions
    assert [RAMP.iterations_within(p) for p in positions] == list(range(61))
    # One sample less drops the incomplete batch, inside the ramp and after it.
    assert [RAMP.iterations_within(p - 1) for p in positions[1:]] == list(range(60))


def test_total_iterations():
    assert total_iterations(run(train_iters=7), RAMP) == 7
    # 7 of 16 reach 112, 3 of 32 reach 208, 2 of 48 reach 304, and 10 of 64 fit into the rest.
    assert total_iterations(run(train_samples=1000), RAMP) == RAMP.iterations_within(1000) == 22
    with pytest.raises(ConfigurationError, match="less than one batch of 16"):
        total_iterations(run(train_samples=15), RAMP)


@pytest.mark.parametrize(
    "batches",
    [RAMP, BatchSizeSchedule.constant(64), BatchSizeSchedule(64, 32, 32, 700)],
    ids=["ramp", "none", "moved"],
)
@pytest.mark.parametrize("start", [Position(5, 40), Position(9, 256), Position(3, 2000)])
def test_a_run_that_goes_on_counts_from_its_position(batches, start):
    """Whatever the batch sizes before it were: stepping to the end comes to the same."""
    position, budget = start, 1700
    while position.consumed_samples + batches.batch_size(position.consumed_samples) <= budget:
        size = batches.batch_size(position.consumed_samples)
        position = Position(position.iteration + 1, position.consumed_samples + size)
    by_samples = run(train_samples=budget)
    assert run_end(by_samples, batches, start) == position
    assert total_iterations(by_samples, batches, start) == position.iteration
    by_iterations = run(train_iters=max(1, position.iteration))
    assert run_end(by_iterations, batches, start) == position


def test_a_run_past_its_end_has_nothing_left():
    assert run_end(run(train_samples=80), RAMP, Position(5, 72)) == Position(5, 72)
    assert run_end(run(train_iters=4), RAMP, Position(5, 72)) == Position(5, 72)


def test_without_a_global_batch_size_each_rank_takes_one_micro_batch():
    config = run(global_batch_size=None, rampup_batch_size=None)
    assert BatchSizeSchedule.from_config(config, 4) == BatchSizeSchedule.constant(8)


def test_the_ramp_is_the_flags():
    assert BatchSizeSchedule.from_config(run(), 8) == RAMP
