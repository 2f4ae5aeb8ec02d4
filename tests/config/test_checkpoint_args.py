"""The model section from a checkpoint: complete, and never against what the user says."""

from typing import Any

import pytest

from megafp8.config import RunConfig, load_config
from megafp8.config.checkpoint_args import take_model
from megafp8.config.cli import parse_command
from megafp8.errors import ConfigurationError

MODEL = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --swiglu "
    "--window-size 7,0 --position-embedding-type rope --hidden-dropout 0.2 --norm-epsilon 1e-6 "
    "--max-position-embeddings 64"
).split()
RUN = "--lr 1e-3 --micro-batch-size 1 --train-iters 2 --mock-data --vocab-size 99".split()
TAKE = ["--load", "ckpt", "--use-checkpoint-args"]


def saved(load: str) -> tuple[str, dict[str, Any]]:
    assert load == "ckpt"
    return "ckpt/iter_0000005", load_config([*MODEL, *RUN]).model_dump(mode="json")


def parse(*flags: str) -> RunConfig:
    return parse_command([*RUN, *TAKE, *flags], saved).config


def test_the_model_is_that_of_the_checkpoint() -> None:
    config, wanted = parse(), load_config([*MODEL, *RUN])
    assert config.model == wanted.model
    assert config.model.window_size == (7, 0)
    assert config.optimizer == wanted.optimizer


def test_equal_values_may_be_repeated_and_derived_ones_said_aloud() -> None:
    flags = "--hidden-size 32 --ffn-hidden-size 64 --kv-channels 8 --num-query-groups 4".split()
    assert parse(*flags).model == parse().model


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--hidden-size 64", "--hidden-size 64 contradicts --hidden-size 32 of ckpt/iter_0000005"),
        ("--ffn-hidden-size 96", "--ffn-hidden-size 96 contradicts --ffn-hidden-size 64 of"),
        ("--no-swiglu", "--no-swiglu False contradicts --swiglu True of"),
        ("--window-size 3,0", "contradicts --window-size"),
        ("--rotary-base 5e5", "contradicts --rotary-base 10000"),
        ("--num-query-groups 2", "contradicts --num-query-groups 4"),
    ],
)
def test_a_contradiction_names_both(flags: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse(*flags.split())
    assert message in str(raised.value)


def test_what_is_no_part_of_the_model_may_differ() -> None:
    config = parse(*"--hidden-dropout 0 --seq-length 8 --transformer-impl native".split())
    assert (config.model.hidden_dropout, config.model.seq_length) == (0.0, 8)
    assert config.model.transformer_impl == "native"
    assert parse().model.transformer_impl == "auto"


def test_it_needs_a_checkpoint() -> None:
    with pytest.raises(ConfigurationError, match="--use-checkpoint-args needs --load"):
        load_config([*MODEL, *RUN, "--use-checkpoint-args"])
    # Nothing is said to be missing that the checkpoint would give.
    with pytest.raises(ConfigurationError, match="^--use-checkpoint-args needs --load$"):
        load_config([*RUN, "--use-checkpoint-args"])
    with pytest.raises(ConfigurationError, match="--use-checkpoint-args is for pretrain_gpt.py"):
        load_config([*RUN, *TAKE])
    with pytest.raises(ConfigurationError, match="here holds an unusable config"):
        take_model({"model": {"num_layers": "three"}}, {}, "here")
