"""YAML scalars that are not what they look like, and files that are not what they should be."""

from pathlib import Path

import pytest

from megafp8.config.cli import load_config
from megafp8.config.yaml_reader import UnreadableFileError, read_yaml
from megafp8.errors import ConfigurationError

TINY = """\
model: {num_layers: 4, hidden_size: 32, num_attention_heads: 4, seq_length: 16,
        position_embedding_type: rope}
training: {micro_batch_size: 2, global_batch_size: 8, train_iters: 10}
optimizer: {lr: 1e-3}
"""


def load(tmp_path: Path, text: str, *flags: str):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(["--config", str(path), *flags])


def error(tmp_path: Path, text: str, *flags: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text, *flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("3e-5", 3e-5), ("1.0e-4", 1e-4), ("1", 1.0), (".5", 0.5)],
)
def test_numbers_without_a_dot_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    by_file = load(tmp_path, TINY.replace("1e-3", text))
    by_flag = load(tmp_path, TINY, "--lr", text)
    assert by_file.optimizer.lr == by_flag.optimizer.lr == value
    assert isinstance(by_file.optimizer.lr, float)


@pytest.mark.parametrize("text", ["nan", ".nan", "abc", "inf", "1e999", "~", "null", "true", "1_0"])
def test_what_is_no_finite_number_is_refused_with_key_and_value(tmp_path: Path, text: str) -> None:
    message = error(tmp_path, TINY.replace("1e-3", text))
    assert "optimizer.lr" in message and "run.yaml line 4" in message
    assert (text in message) or ("null" in message)
    assert "--lr" in error(tmp_path, TINY, "--lr", text)


@pytest.mark.parametrize("text", ["010", "1e4", "1_000", "0x10", "1.0", "12:30:00", "true", "''"])
def test_what_is_no_plain_integer_is_refused(tmp_path: Path, text: str) -> None:
    message = error(tmp_path, TINY + f"parallel: {{fsdp_size: {text}}}\n")
    assert "parallel.fsdp_size" in message and "an integer" in message


def test_quoted_numbers_are_text(tmp_path: Path) -> None:
    assert "in quotes" in error(tmp_path, TINY.replace("1e-3", '"1e-3"'))


@pytest.mark.parametrize("text", ["off", "no", "on", "yes", "0", "1", "'true'"])
def test_only_true_and_false_are_booleans(tmp_path: Path, text: str) -> None:
    message = error(tmp_path, TINY + f"precision: {{bf16: {text}}}\n")
    assert "precision.bf16" in message and "true or false" in message


def test_off_is_text_for_a_choice(tmp_path: Path) -> None:
    message = error(tmp_path, TINY + "precision: {fp8_recipe: off}\n")
    assert "found 'off'" in message and "auto, delayed" in message


def test_text_fields_keep_what_looks_like_something_else(tmp_path: Path) -> None:
    extra = "logging: {run_dir: 12:30:00, wandb_project: 010, tensorboard_dir: no}\n"
    logging = load(tmp_path, TINY + extra).logging
    assert (logging.run_dir, logging.wandb_project) == ("12:30:00", "010")
    assert logging.tensorboard_dir == "no"


def test_null_is_refused_with_its_key(tmp_path: Path) -> None:
    for text in ("~", "null", ""):
        message = error(tmp_path, TINY + f"logging:\n  run_dir: {text}\n")
        assert "logging.run_dir" in message and "found null" in message


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (TINY + "optimizer: {lr: 1}\n", ("optimizer", "given twice")),
        (TINY.replace("{lr: 1e-3}", "{lr: 1e-3, lr: 1}"), ("optimizer.lr", "given twice")),
        (TINY + "parallel: {fsdp: 2}\n", ("parallel.fsdp", "unknown key", "fsdp_size")),
        (TINY + "parallel: {lr: 2}\n", ("parallel.lr", "belongs in section optimizer")),
        (TINY + "paralel: {fsdp_size: 2}\n", ("paralel", "unknown section")),
        (TINY + "seed: 3\n", ("seed", "belongs in section training")),
        (TINY + "parallel: 3\n", ("parallel", "no mapping")),
        (TINY + "parallel: {fsdp_size: !!float 2}\n", ("run.yaml line 5", "tags such as !!float")),
        (TINY + "parallel: {fsdp_size: !!str 2}\n", ("run.yaml line 5", "tags such as !!str")),
        (TINY + "parallel: {<<: {fsdp_size: 2}}\n", ("merge keys",)),
        (TINY + "parallel: {fsdp_size: [1, 2]}\n", ("fsdp_size", "2 values")),
        (TINY + "parallel: {fsdp_size: {a: 2}}\n", ("fsdp_size", "nested")),
        (TINY + "parallel: {fsdp_size: 2\n", ("not valid YAML", "line")),
        ("- 1\n", ("no mapping",)),
        (
            TINY + "precision: {no_fp8_wgrad: true, fp8_wgrad: true}\n",
            ("fp8_wgrad", "contradicts"),
        ),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, fragments: tuple[str, ...]) -> None:
    message = error(tmp_path, text)
    for fragment in fragments:
        assert fragment in message, message


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="missing.yaml"):
        read_yaml(str(tmp_path / "missing.yaml"))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(UnreadableFileError, match="UTF-8"):
        read_yaml(str(binary))


def test_an_empty_file_gives_defaults_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert read_yaml(str(path)) == {}
    assert load(tmp_path, TINY, "--lr", "0.5", "--seed", "7").optimizer.lr == 0.5


def test_negative_keys_and_flags_override_each_other(tmp_path: Path) -> None:
    text = TINY.replace("train_iters: 10", "train_iters: 10, deterministic_mode: true")
    assert load(tmp_path, text).training.deterministic_mode
    assert not load(tmp_path, text, "--no-deterministic-mode").training.deterministic_mode
    off = TINY.replace(
        "train_iters: 10", "train_iters: 10, no_check_for_nan_in_loss_and_grad: true"
    )
    assert not load(tmp_path, off).training.check_for_nan_in_loss_and_grad
    assert load(
        tmp_path, off, "--check-for-nan-in-loss-and-grad"
    ).training.check_for_nan_in_loss_and_grad


def test_lists_and_lone_values(tmp_path: Path) -> None:
    ramp = TINY.replace("train_iters: 10", "train_iters: 10, rampup_batch_size: [4, 2, 100]")
    assert load(tmp_path, ramp).training.rampup_batch_size == (4, 2, 100)
    for text in ("a/b", "[a/b]"):
        data = load(tmp_path, TINY + f"data: {{data_path: {text}}}\n").data
        assert data.data_path == ("a/b",)


def test_all_wrong_names_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    message = error(
        tmp_path,
        TINY + "parallel: {fsdp: 2, lr: 1}\nlogging: {run_dirs: x}\npresicion: {bf16: on}\n",
    )
    for fragment in (
        "parallel.fsdp: unknown key",
        "parallel.lr: belongs in section optimizer",
        "logging.run_dirs: unknown key; did you mean run_dir",
        "presicion: unknown section",
    ):
        assert fragment in message
    values = TINY + "data: {num_workers: many}\nlogging: {log_interval: often}\n"
    message = error(tmp_path, values)
    assert "num_workers" in message and "log_interval" in message and "\n" not in message
