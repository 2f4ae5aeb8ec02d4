"""Learning-rate schedules against values of Megatron's OptimizerParamScheduler.

The golden values were produced with megatron-core 0.16.1 (`get_lr` at `num_steps`); the last test
repeats the comparison on random schedules where that package is installed.
"""

import random
import warnings
from types import SimpleNamespace

import pytest

from megafp8.config.optimizer import OptimizerConfig
from megafp8.config.training import TrainingConfig
from megafp8.errors import ConfigurationError
from megafp8.train.batch_size import BatchSizeSchedule, Position
from megafp8.train.schedule import DECAY_STYLES, WSD_DECAY_STYLES, LearningRateSchedule
from tests.support.oracles import need

# style, max_lr, min_lr, warm-up, decay, WSD decay, WSD style -> {position: rate}
GOLDEN = [
    (
        ("linear", 3e-4, 3e-5, 80, 800),
        {0: 0.0, 40: 0.00015, 80: 0.0003, 200: 0.00025499999999999996, 400: 0.00017999999999999998,
         720: 6.000000000000001e-05, 800: 3e-05, 801: 3e-05},
    ),
    (
        ("inverse-square-root", 1e-3, 1e-4, 64, 4096),
        {0: 0.0, 32: 0.0005, 64: 0.001, 1024: 0.00025, 2048: 0.00017677669529663688,
         3686: 0.00013176871827811647, 4096: 0.000125, 4097: 0.0001},
    ),
    (
        ("constant", 2e-4, 0.0, 40, 400),
        {0: 0.0, 20: 0.0001, 40: 0.0002, 200: 0.0002, 400: 0.0002, 401: 0.0002},
    ),
    (
        ("WSD", 1e-3, 1e-5, 64, 1600, 320, "exponential"),
        {32: 0.0005, 64: 0.001, 800: 0.001, 1440: 0.0004200714267493642, 1600: 1e-05, 1601: 1e-05},
    ),
    (
        ("WSD", 1e-3, 1e-5, 64, 1600, 320, "linear"),
        {0: 0.0, 1280: 0.001, 1440: 0.000505, 1600: 1e-05, 1601: 1e-05},
    ),
    (
        ("WSD", 1e-3, 1e-5, 64, 1600, 320, "cosine"),
        {0: 0.0, 1280: 0.001, 1440: 0.000505, 1600: 1e-05, 1601: 1e-05},
    ),
    (
        ("WSD", 1e-3, 1e-5, 64, 1600, 320, "minus_sqrt"),
        {400: 0.001, 1440: 0.00029996428662531794, 1600: 1e-05, 1601: 1e-05},
    ),
]  # fmt: skip


def schedule(style, max_lr, min_lr, warmup, decay, wsd=None, wsd_style="exponential"):
    return LearningRateSchedule(max_lr, min_lr, warmup, decay, style, wsd, wsd_style)


def run(**changes):
    """Return the two sections of a configuration that the schedule reads."""
    optimizer = {"lr": 1.0, "min_lr": 0.1, "lr_decay_style": "cosine"}
    training = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 100}
    for name, value in changes.items():
        (optimizer if name in OptimizerConfig.model_fields else training)[name] = value
    return SimpleNamespace(
        optimizer=OptimizerConfig(**optimizer), training=TrainingConfig(**training)
    )


def schedule_of(**changes):
    config = run(**changes)
    return LearningRateSchedule.from_config(config, BatchSizeSchedule.from_config(config, 2))


@pytest.mark.parametrize("arguments, expected", GOLDEN, ids=lambda value: str(value)[:40])
def test_rates_equal_megatrons(arguments, expected):
    rates = schedule(*arguments)
    assert {position: rates.learning_rate(position) for position in expected} == expected


def test_cosine_equals_megatrons_published_table():
    rates = schedule("cosine", 1.0, 0.1, 10, 100)
    expected = [1, 0.97286, 0.89472, 0.775, 0.62814, 0.47186, 0.325, 0.20528, 0.12714, 0.1]
    assert [round(rates.learning_rate(p), 5) for p in range(10, 101, 10)] == expected


def test_iterations_count_global_batches():
    rates = schedule_of(lr_warmup_iters=10)
    assert (rates.warmup_samples, rates.decay_samples) == (40, 400)
    # Position 200 of [40, 400] is the 50th iteration of the table above.
    assert round(rates.learning_rate(200), 5) == 0.62814


def test_warmup_fraction_is_of_the_decay_and_wins():
    rates = schedule_of(lr_warmup_iters=50, lr_warmup_fraction=0.25, lr_decay_iters=40)
    assert (rates.warmup_samples, rates.decay_samples) == (40.0, 160)


def test_first_step_of_a_warmup_has_rate_zero_and_without_warmup_the_maximum():
    assert schedule("cosine", 1.0, 0.0, 10, 100).learning_rate(0) == 0.0
    assert schedule("cosine", 1.0, 0.0, 0, 100).learning_rate(0) == 1.0


def test_decay_ends_with_the_run_when_samples_or_a_ramp_are_given():
    by_samples = schedule_of(train_iters=None, train_samples=1000)
    assert by_samples.decay_samples == 1000
    ramp = schedule_of(rampup_batch_size=(2, 2, 100))
    # 50 iterations of 2 reach sample 100, one of 4 (Megatron's ramp includes its end), 49 of 4.
    assert ramp.decay_samples == 300
    assert ramp.learning_rate(300) == 0.1 < ramp.learning_rate(299)


def test_the_decay_of_a_run_that_goes_on_ends_where_it_ends():
    """Batches of 4 for 30 of 100 iterations, then of 8: 120 + 70 * 8 samples."""
    config = run(global_batch_size=8)
    batches = BatchSizeSchedule.from_config(config, 2)
    rates = LearningRateSchedule.from_config(config, batches, Position(30, 120))
    assert rates.decay_samples == 680
    assert rates.learning_rate(680) == 0.1 < rates.learning_rate(672)
    # Where it goes on once more it is the same schedule; past its end it is any.
    again = LearningRateSchedule.from_config(config, batches, Position(50, 280))
    assert again == rates
    past = LearningRateSchedule.from_config(config, batches, Position(100, 680))
    assert past.decay_samples == 800


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"min_lr": 2.0}, "--min-lr 2"),
        ({"lr_warmup_iters": 100}, "warm-up of 400 samples must be shorter"),
        ({"lr_decay_style": "WSD"}, "needs --lr-wsd-decay-iters"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101}, "must be positive and fit"),
    ],
)
def test_contradictions_are_one_line_errors(changes, message):
    with pytest.raises(ConfigurationError) as error:
        schedule_of(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_style_names_the_known_ones():
    with pytest.raises(ConfigurationError, match="allowed are constant, linear, cosine, inv"):
        schedule("polynomial", 1.0, 0.0, 0, 10)
    with pytest.raises(ConfigurationError, match="allowed are exponential, linear, cosine, minus"):
        schedule("WSD", 1.0, 0.0, 0, 10, 5, "sqrt")


def random_schedules(count):
    draw = random.Random(0)
    for _ in range(count):
        style, wsd_style = draw.choice(DECAY_STYLES), draw.choice(WSD_DECAY_STYLES)
        decay = draw.randint(2, 5000)
        warmup = draw.choice([0, draw.randint(0, decay - 1), 0.1 * decay])
        max_lr = 10 ** draw.uniform(-5, 0)
        wsd = max(1, int(draw.uniform(0, 1) * (decay - warmup))) if style == "WSD" else None
        positions = [0, int(warmup), int(warmup) + 1, decay - 1, decay, decay + 1]
        positions += [draw.randint(0, decay) for _ in range(6)]
        yield (style, max_lr, max_lr * draw.random(), warmup, decay, wsd, wsd_style), positions


def test_random_schedules_equal_megatrons_where_it_is_installed():
    need("megatron")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of the GPU libraries that it does not find
        from megatron.core import optimizer_param_scheduler as module
    optimizer = SimpleNamespace(param_groups=[{}])
    for arguments, positions in random_schedules(300):
        style, max_lr, min_lr, warmup, decay, wsd, wsd_style = arguments
        theirs = module.OptimizerParamScheduler(
            optimizer, 0.0, max_lr, min_lr, warmup, decay, style, 0.0, 0.0, 0, "constant",
            wsd_decay_steps=wsd, lr_wsd_decay_style=wsd_style,
        )  # fmt: skip
        ours = schedule(*arguments)
        for position in positions:
            theirs.num_steps = position
            assert ours.learning_rate(position) == theirs.get_lr({}), (arguments, position)
