"""A checkpoint of another model is refused even where all shapes agree; other data are named."""

import logging

import pytest

from megafp8.checkpoint import CheckpointRecord
from megafp8.errors import CheckpointError
from megafp8.train.continuity import check_same_run
from tests.model.small import GPT2, LLAMA, small_config


def record(style, **changes) -> CheckpointRecord:
    return CheckpointRecord(1, config=small_config(style, **changes).model_dump(mode="json"))


@pytest.mark.parametrize(
    "style, changes, named",
    [
        (LLAMA, {"num_attention_heads": 8, "kv_channels": 8}, "num_attention_heads was 4, now 8"),
        (LLAMA, {"rotary_base": 500000.0}, "rotary_base was 10000.0, now 500000.0"),
        (LLAMA, {"rotary_percent": 0.5}, "rotary_dim was 8, now 4"),
        (LLAMA, {"norm_epsilon": 1e-6}, "norm_epsilon was 1e-05, now 1e-06"),
        (LLAMA, {"use_rope_scaling": True}, "use_rope_scaling was False, now True"),
        (LLAMA, {"window_size": (4, 0)}, "window_size was None, now (4, 0)"),
        (GPT2, {"activation": "gelu"}, "activation was gelu-tanh, now gelu"),
    ],
)
def test_another_model_of_equal_shapes_is_refused(tmp_path, style, changes, named) -> None:
    with pytest.raises(CheckpointError, match="is of another model") as caught:
        check_same_run(tmp_path, record(style), small_config(style, **changes))
    assert named in str(caught.value)


def test_what_was_derived_then_and_is_said_now_is_equal(tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING, "megafp8"):
        check_same_run(tmp_path, record(LLAMA), small_config(LLAMA, kv_channels=8))
        check_same_run(tmp_path, record(LLAMA), small_config(LLAMA, hidden_dropout=0.3))
    assert not caplog.records


def test_other_data_and_schedule_are_one_warning(tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING, "megafp8"):
        check_same_run(tmp_path, record(LLAMA), small_config(LLAMA, seed=7, global_batch_size=16))
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "seed was 1234, now 7" in line and "global_batch_size was 8, now 16" in line


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"train_iters": 60}, "train_iters was 40, now 60 (the learning rate follows)"),
        ({"train_iters": 60, "lr_decay_iters": 40}, "lr_decay_iters was None, now 40; train_it"),
        ({"min_lr": 1e-5}, "min_lr was 0.0, now 1e-05"),
        ({"lr_warmup_iters": 5}, "lr_warmup_iters was 0, now 5"),
        ({"lr_warmup_fraction": 0.1}, "lr_warmup_fraction was None, now 0.1"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 5, "lr_wsd_decay_style": "linear"},
            "lr_wsd_decay_iters was None, now 5; lr_wsd_decay_style was exponential, now linear",
        ),
        ({"weight_decay": 0.1}, "weight_decay was 0.01, now 0.1"),
    ],
)
def test_what_moves_the_learning_rate_is_said(tmp_path, caplog, changes, words) -> None:
    before = {"lr": 1e-3, "train_iters": 40}
    with caplog.at_level(logging.WARNING, "megafp8"):
        check_same_run(
            tmp_path, record(LLAMA, **before), small_config(LLAMA, **{**before, **changes})
        )
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert words in line


@pytest.mark.parametrize("schedule", [{"lr_decay_iters": 30}, {"lr_decay_style": "constant"}])
def test_a_longer_run_whose_rates_stay_is_not_worth_a_word(tmp_path, caplog, schedule) -> None:
    with caplog.at_level(logging.WARNING, "megafp8"):
        check_same_run(
            tmp_path,
            record(LLAMA, train_iters=40, **schedule),
            small_config(LLAMA, train_iters=60, **schedule),
        )
    assert not caplog.records
