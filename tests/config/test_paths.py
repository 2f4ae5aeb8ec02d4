"""Paths of flags and YAML: `~` is a home folder, a shell's variable is refused by key and value."""

from pathlib import Path
from typing import Any, Literal

import pytest

from megafp8.config.cli import load_config
from megafp8.config.names import SECTIONS
from megafp8.config.paths import FilePath, expand_path
from megafp8.config.text import RawText, convert, field_kind
from megafp8.errors import ConfigurationError

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--position-embedding-type rope --micro-batch-size 2 --train-iters 10 --lr 1e-3"
).split()

# Fields that hold text and no path.
TEXTS = {"split", "wandb_project", "wandb_exp_name", "fp8_amax_compute_algo"}


def text_of(annotation: Any) -> Any:
    """`str` or `FilePath` for a field of text or of a list of it, else something else."""
    kind, arguments = field_kind(annotation)
    return field_kind(arguments[0])[0] if kind is tuple else kind


FIELDS = {
    (section, field): info.annotation
    for section, model in SECTIONS.items()
    for field, info in model.model_fields.items()
}
PATHS = {key: kind for key, kind in FIELDS.items() if text_of(kind) is FilePath}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(argv: list[str]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_config(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_field_of_text_is_a_path_or_known_to_be_none() -> None:
    texts = {field for (_, field), kind in FIELDS.items() if text_of(kind) is str}
    assert texts == TEXTS
    kinds = {text_of(kind) for kind in FIELDS.values()}
    assert kinds == {str, FilePath, int, float, bool, Literal}


@pytest.mark.parametrize(("key", "kind"), PATHS.items(), ids=lambda item: str(item))
def test_every_path(home: Path, key: tuple[str, str], kind: Any) -> None:
    section, field = key
    flag = "--" + field.replace("_", "-")
    found = convert(RawText("~/a b/c", flag), kind)
    assert found in (f"{home}/a b/c", (f"{home}/a b/c",))
    assert convert(RawText("a/~/$5", flag), kind) in ("a/~/$5", ("a/~/$5",))
    for text in ("$HOME/x", "x/${SCRATCH}/y", "$(date)/x", "~/$USER"):
        message = refusal([*TINY, f"{flag}={text}"])
        assert message.startswith(f"{flag}: found '{text}', allowed a path without shell variables")
        Path("t.yaml").write_text(f"{section}:\n  {field}: {text}\n")
        message = refusal([*TINY, "--config", "t.yaml"])
        assert message.startswith(
            f"t.yaml line 2, {section}.{field}: found '{text}', allowed a path"
        )
    assert "no-such-user" in refusal([*TINY, f"{flag}=~no-such-user/x"])
    # A lone ~ is YAML's null.
    Path("t.yaml").write_text(f"{section}:\n  {field}: ~\n")
    assert "found null" in refusal([*TINY, "--config", "t.yaml"])


def test_a_run_in_the_home_folder(home: Path) -> None:
    text = "checkpoint: {load: ~/r/checkpoints}\nlogging: {run_dir: '~/r'}\n"
    (home / "t.yaml").write_text(text + "data: {data_path: [1.0, ~/corpus]}\n")
    config = load_config([*TINY, "--config=~/t.yaml", "--save=~/s"])
    assert config.checkpoint.load == f"{home}/r/checkpoints"
    assert config.checkpoint.save == f"{home}/s"
    assert config.logging.run_dir == f"{home}/r"
    assert config.data.data_path == (f"{home}/corpus",)
    assert config.to_dict()["logging"]["run_dir"] == f"{home}/r"  # as the run folder keeps it
    assert "--config: found '$HOME/t.yaml'" in refusal([*TINY, "--config", "$HOME/t.yaml"])


@pytest.mark.parametrize("flag", ["--data-path", "--train-data-path"])
def test_one_corpus_with_a_weight_is_that_corpus(flag: str) -> None:
    data = load_config([*TINY, flag, "1.0", "a"]).data
    assert ("a",) in (data.data_path, data.train_data_path)
    for words in (["0.3", "a", "0.7", "b"], ["a", "b"], ["nan", "a"], ["0", "a"], ["1", "2", "a"]):
        message = refusal([*TINY, flag, *words])
        assert message.startswith(f"{flag}: found {tuple(words)!r}, allowed one corpus, PREFIX or")
        assert "tools/preprocess_data.py writes one corpus of all files of --input" in message


def test_users_are_looked_up() -> None:
    assert expand_path("~root/x") == "/root/x"
    with pytest.raises(
        ValueError, match=r"an existing user's home folder; .* is \./~nobody-here/x"
    ):
        expand_path("~nobody-here/x")
