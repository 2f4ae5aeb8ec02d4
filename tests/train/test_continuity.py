"""A checkpoint of another model is refused even where all shapes agree; what changed is told."""

import copy
import dataclasses
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint import CheckpointRecord
from megafp8.config import RunConfig
from megafp8.config.meaning import MODEL, NO_EFFECT, NUMBERS, OWNER, setting_differences
from megafp8.errors import CheckpointError
from megafp8.train.batch_size import BatchSizeSchedule, Position
from megafp8.train.continuity import check_same_run, schedule_changes
from megafp8.train.schedule import LearningRateSchedule
from tests.model.small import FP8, GPT2, LLAMA, small_config


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
        check_same_run(tmp_path, record(LLAMA), small_config(LLAMA, init_method_std=0.3))
        local = record(LLAMA, transformer_impl="local")
        check_same_run(tmp_path, local, small_config(LLAMA, transformer_impl="native"))
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


# ------------------------------------------------------------------------- a kind for every field


def test_every_field_is_classified_once() -> None:
    numbers = [field for fields in NUMBERS.values() for field in fields]
    kinds = Counter([*MODEL, *NO_EFFECT, *numbers])
    assert set(kinds) == set(OWNER), sorted(set(kinds) ^ set(OWNER))
    assert not [field for field, count in kinds.items() if count > 1]


def replaced(config: RunConfig, **changes: Any) -> RunConfig:
    """Another configuration, whether or not a run could have it."""
    for field, value in changes.items():
        section = getattr(config, OWNER[field]).model_copy(update={field: value})
        config = config.model_copy(update={OWNER[field]: section})
    return config


# Values that mean something else than the default; for all other fields any will do.
OTHERS = {
    "split": "1,1",
    "fp8_format": "e4m3",
    "transformer_impl": "native",
    "fp8_recipe": "tensorwise",
    "fp8_power_of_2_scales": True,
    "pipeline_schedule": "zbv",
    "first_last_layers_bf16": 2,
    "optimizer": "apex",
}


@pytest.mark.parametrize("field", [field for fields in NUMBERS.values() for field in fields])
def test_what_changes_numbers_is_told_with_both_values_and_its_effect(field: str) -> None:
    before = replaced(small_config(LLAMA, **FP8), fp16=1, first_last_layers_bf16=True)
    now = replaced(before, **{field: OTHERS.get(field, 0.123)})
    (effect,) = [effect for effect, fields in NUMBERS.items() if field in fields]
    (phrase,) = setting_differences(before, now)
    was, becomes = (getattr(getattr(one, OWNER[field]), field) for one in (before, now))
    assert phrase == f"{field} was {was}, now {becomes} ({effect})"
    assert not list(setting_differences(now, now))


@pytest.mark.parametrize("field", NO_EFFECT)
def test_what_changes_no_number_is_not_worth_a_word(field: str) -> None:
    before = small_config(LLAMA, **FP8)
    assert not list(setting_differences(before, replaced(before, **{field: 0.123})))


def test_a_field_that_nobody_classified_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafp8.config.meaning.NO_EFFECT", NO_EFFECT[1:])
    before = small_config(LLAMA)
    (phrase,) = setting_differences(before, replaced(before, **{NO_EFFECT[0]: 0.123}))
    assert phrase == f"{NO_EFFECT[0]} was 0.02, now 0.123 (the numbers may be others)"


def test_settings_without_a_meaning_are_not_told() -> None:
    """Margins of no FP8, betas of SGD, loss scales of BF16."""
    before = small_config(LLAMA, optimizer="sgd", bf16=True)
    idle = {"fp8_margin": 3, "adam_beta2": 0.5, "hysteresis": 9, "fp8_format": "none"}
    assert not list(setting_differences(before, replaced(before, **idle)))


# --------------------------------------------------------------------------------- what was read


def corpus(path: str = "/data/c", documents: int = 10, sha256: str = "ab" * 32) -> dict[str, Any]:
    return {"path": path, "documents": documents, "tokens": 40 * documents, "sha256": sha256}


TOKENIZER = {"path": "/tok/tokenizer.json", "sha256": "cd" * 32, "vocab_size": 100, "eod": 0}
PARTS = ("train", "valid", "test")
READ = {"corpora": {"data_path": corpus()}, "files": {"tokenizer_model": TOKENIZER}}
FILES = {
    "mock_data": None,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "/tok",
    "data_path": ("/data/c",),
    "load": "runs/a",
}


def changed(kind: str, field: str, **facts: Any) -> dict[str, Any]:
    fingerprint: dict[str, Any] = copy.deepcopy(READ)
    fingerprint[kind][field] |= facts
    return fingerprint


def trained(**state: Any) -> CheckpointRecord:
    made = record(LLAMA, **FILES)
    return dataclasses.replace(made, data_position={"consumed_samples": 8}, state=state)


def test_a_grown_corpus_is_refused_together_with_another_model(tmp_path) -> None:
    grown = changed("corpora", "data_path", documents=12, sha256="ef" * 32)
    config = small_config(LLAMA, **FILES, norm_epsilon=1e-6)
    with pytest.raises(CheckpointError) as caught:
        check_same_run(tmp_path, trained(fingerprint=READ), config, grown)
    text = str(caught.value)
    assert "norm_epsilon was 1e-05, now 1e-06" in text
    assert "--data-path /data/c is not what it was at iteration 1: 10 documents, 400" in text
    assert "give --allow-changed-corpus: from sample 8 on" in text


@pytest.mark.parametrize(
    ("fields", "effect"),
    [
        (["valid_data_path"], "from sample 8 on validation and test losses are of other samples"),
        (["train_data_path"], "from sample 8 on the samples still to come are others: some text"),
        (
            ["test_data_path", "train_data_path", "valid_data_path"],
            "some never, and validation and test losses are of other samples",
        ),
    ],
)
def test_a_refusal_says_what_the_changed_corpus_changes(tmp_path, fields, effect) -> None:
    paths = {"data_path": None} | {f"{part}_data_path": ("/data/c",) for part in PARTS}
    config = small_config(LLAMA, **{**FILES, **paths})
    before, now = (
        {"corpora": {f"{part}_data_path": corpus() for part in PARTS}, "files": {}} for _ in "ab"
    )
    now["corpora"] |= {field: corpus(documents=12) for field in fields}
    made = dataclasses.replace(trained(fingerprint=before), config=config.model_dump(mode="json"))
    with pytest.raises(CheckpointError) as caught:
        check_same_run(tmp_path, made, config, now)
    text = str(caught.value)
    assert effect in text
    assert ("some text may come again" in text) == ("train_data_path" in fields)


def test_a_changed_corpus_may_be_meant_and_weights_may_go_to_any(tmp_path) -> None:
    other = changed("corpora", "data_path", sha256="ef" * 32)
    meant = small_config(LLAMA, **FILES, allow_changed_corpus=True)
    (told,) = check_same_run(tmp_path, trained(fingerprint=READ), meant, other)
    assert "(sha256 abababab) then" in told and "(sha256 efefefef) now" in told
    assert "some text may come again" in told
    weights = small_config(LLAMA, **FILES, finetune=True)
    assert not check_same_run(tmp_path, trained(fingerprint=READ), weights, other)


def test_a_corpus_of_another_name_is_told_where_its_contents_differ(tmp_path) -> None:
    config = small_config(LLAMA, **{**FILES, "data_path": ("/data/d",)})
    moved = changed("corpora", "data_path", path="/data/d")
    assert not check_same_run(tmp_path, trained(fingerprint=READ), config, moved)
    other = changed("corpora", "data_path", path="/data/d", documents=7, sha256="ef" * 32)
    (told,) = check_same_run(tmp_path, trained(fingerprint=READ), config, other)
    assert "data_path was /data/c, 10 documents, 400 tokens" in told
    assert "now /data/d, 7 documents, 40" in told and "some text may come again" in told


def test_a_changed_tokenizer_is_told(tmp_path) -> None:
    other = changed("files", "tokenizer_model", sha256="ef" * 32, eod=1)
    (told,) = check_same_run(
        tmp_path, trained(fingerprint=READ), small_config(LLAMA, **FILES), other
    )
    assert "sha256 cdcdcdcd, vocab_size 100, eod 0, now /tok/tokenizer.json" in told
    assert told.endswith("eod 1 (token ids may mean something else)")


def test_another_backend_is_told_though_both_were_asked_for_as_auto(tmp_path) -> None:
    before, now = ({**READ, "backend": name} for name in ("native", "transformer_engine"))
    config = small_config(LLAMA, **FILES)
    (told,) = check_same_run(tmp_path, trained(fingerprint=before), config, now)
    assert told.startswith("transformer_impl was native, now transformer_engine (")


def test_a_checkpoint_of_an_earlier_version_goes_on_with_a_word(tmp_path, caplog) -> None:
    with caplog.at_level(logging.WARNING, "megafp8"):
        check_same_run(tmp_path, trained(), small_config(LLAMA, **FILES), READ)
        nothing: dict[str, Any] = {"corpora": {}, "files": {}}
        check_same_run(tmp_path, record(LLAMA), small_config(LLAMA), nothing)
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "holds no fingerprint of what was read" in line


# ---------------------------------------------------------------------------------- the schedule

CONSTANT = {"lr_decay_style": "constant"}
ROOT = {"lr_decay_style": "inverse-square-root"}
BUDGET = {"train_iters": None, "train_samples": 80}


def first_without_a_rate(config: RunConfig) -> int:
    """Counted one by one from iteration 5, sample 40."""
    start = Position(5, 40)
    batches = BatchSizeSchedule.from_config(config, 1)
    schedule = LearningRateSchedule.from_config(config, batches, start)
    rates = [schedule.learning_rate(batches.consumed_after(n, 40)) for n in range(100)]
    return start.iteration + 1 + rates.index(0.0)


@pytest.mark.parametrize(
    ("before", "now", "phrases"),
    [
        ({}, {}, []),
        (
            {},
            {"global_batch_size": 16},
            [
                "--train-iters 20 now ends at iteration 20 with 280 samples, was iteration 20 with "
                "160",
                "the learning rate jumps from 0.00075 to 0.000857143",
                "its decay ends at sample 280, was 160",
            ],
        ),
        (
            {**CONSTANT, "lr_warmup_iters": 10},
            {**CONSTANT, "lr_warmup_iters": 4},
            [
                "the learning rate jumps from 0.0005 to 0.001",
                "its warm-up ends at sample 32, was 80",
            ],
        ),
        (
            {"lr_decay_iters": 20},
            {"lr_decay_iters": 20, "train_iters": 30},
            [
                "the learning rate reaches 0 at sample 160 and the run ends at sample 240: from "
                "iteration 21 on nothing is learned; give a longer --lr-decay-iters, or --min-lr"
            ],
        ),
        (
            {"lr_decay_iters": 10},
            {"lr_decay_iters": 10, "global_batch_size": 16},
            [
                "--train-iters 20 now ends at iteration 20 with 280 samples, was iteration 20 with "
                "160",
                "the learning rate jumps from 0.0005 to 0.00075",
                "its decay ends at sample 160, was 80",
                "the learning rate reaches 0 at sample 160 and the run ends at sample 280: from "
                "iteration 14 on nothing is learned; give a longer --lr-decay-iters, or --min-lr",
            ],
        ),
        (
            {"lr_decay_iters": 4},
            {"lr_decay_iters": 4},
            [
                "the learning rate reaches 0 at sample 32 and the run ends at sample 160: from "
                "iteration 6 on nothing is learned; give a longer --lr-decay-iters, or --min-lr"
            ],
        ),
        (
            {"lr_decay_iters": 4, "lr_warmup_iters": 2, "min_lr": 1e-5},
            {"lr_decay_iters": 3, "lr_warmup_iters": 1, "min_lr": 1e-5},
            [],
        ),
        (
            {**ROOT, "lr_decay_iters": 20},
            {**ROOT, "lr_decay_iters": 20, "train_iters": 30},
            [
                "the learning rate reaches 0 at sample 160 and the run ends at sample 240: from "
                "iteration 22 on nothing is learned; give a longer --lr-decay-iters, or --min-lr"
            ],
        ),
        (
            {"lr_decay_iters": 20, "min_lr": 1e-5},
            {"lr_decay_iters": 20, "min_lr": 1e-5, "train_iters": 30},
            [],
        ),
        (
            BUDGET,
            {**BUDGET, "rampup_batch_size": (4, 4, 56)},
            [
                "--train-samples 80 now ends at iteration 12 with 80 samples, was iteration 10 "
                "with 80",
            ],
        ),
    ],
)
def test_where_a_changed_schedule_leads_is_said(before, now, phrases, caplog) -> None:
    position = {"iteration": 5, "data_position": {"consumed_samples": 40}}
    made = dataclasses.replace(record(LLAMA, **before), **position)
    with caplog.at_level(logging.WARNING, "megafp8"):
        found = schedule_changes(Path("iter_0000005"), made, small_config(LLAMA, **now), 1)
    assert found == phrases
    if any("nothing is learned" in phrase for phrase in phrases):
        assert f"iteration {first_without_a_rate(small_config(LLAMA, **now))} on" in phrases[-1]
    line = f"going on at iteration 5, sample 40: {'; '.join(phrases)}"
    assert [entry.getMessage() for entry in caplog.records] == ([line] if phrases else [])
