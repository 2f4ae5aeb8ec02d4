"""File systems that do not answer: a named error in bounded time, whatever is read there."""

import os
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from megafp8.config import load_config
from megafp8.errors import DataError
from megafp8.train.mounts import check_answer, check_files_answer
from tests.support.limits import PATIENCE_S

MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --lr 1e-3 --micro-batch-size 1 --train-iters 2"
).split()


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[[str], None], None, None]:
    """Makes an operation on paths below a folder "dead" not return."""
    end = threading.Event()

    def plant(operation: str) -> None:
        owner = os if operation == "scandir" else Path
        real = getattr(owner, operation)

        def hang(path: object, *arguments: object, **keywords: object) -> object:
            if "dead" in str(path):
                end.wait(PATIENCE_S)
            return real(path, *arguments, **keywords)

        monkeypatch.setattr(owner, operation, hang)

    yield plant
    end.set()


@pytest.mark.parametrize("operation", ["stat", "open", "scandir"])
def test_what_does_not_answer_is_named_and_nothing_else(
    tmp_path: Path, dead: Callable[[str], None], operation: str
) -> None:
    (tmp_path / "dead" / "tokenizer").mkdir(parents=True)
    (tmp_path / "dead" / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "c.idx").write_text("x")
    config = load_config(
        [
            *MODEL,
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(tmp_path / "dead" / "tokenizer")),
            *("--data-path", str(tmp_path / "c"), "--run-dir", str(tmp_path / "new")),
        ]
    )
    check_files_answer(config)  # that there is no c.bin is not its business
    dead(operation)
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        check_files_answer(config, 0.3)
    assert time.monotonic() - began < 30.0
    text = str(caught.value)
    assert text.startswith(f"--tokenizer-model {tmp_path}/dead/tokenizer: the file system has not")
    assert "--data-path" not in text and "--run-dir" not in text


def test_all_that_do_not_answer_are_named_at_once(
    tmp_path: Path, dead: Callable[[str], None]
) -> None:
    dead("stat")
    folder = tmp_path / "dead"
    argv = f"--mock-data --vocab-size 99 --load {folder}/a --save {folder}/b --run-dir {folder}/c"
    config = load_config([*MODEL, *argv.split()])
    with pytest.raises(DataError) as caught:
        check_files_answer(config, 0.3)
    for name in ("--load", "--save", "--run-dir"):
        assert name in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.idx")
    config = load_config([*MODEL, "--vocab-size", "99", "--data-path", str(tmp_path / "c")])
    with pytest.raises(DataError, match=r"--data-path .*c\.idx is neither a file nor a folder"):
        check_files_answer(config)


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "added_tokens.json"])
def test_a_pair_of_vocabulary_and_merges_is_looked_at(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    config = load_config([*MODEL, *tokenizer, "--mock-data"])
    with pytest.raises(DataError, match=f"--tokenizer-model .*{name} is neither a file"):
        check_files_answer(config)


def test_what_is_missing_answers(tmp_path: Path) -> None:
    check_answer({"--load x": [tmp_path / "no", tmp_path / ("n" * 300), Path("\0")]})
