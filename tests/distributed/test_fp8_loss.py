"""FP8 reaches BF16's loss: the quickstart's model on the quickstart's data (about an hour)."""

import math
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.tools import fp8_loss

ROOT = Path(__file__).resolve().parents[2]
# A learning rate at which two BF16 runs that round differently stay together.
CALM = ("--lr", "4e-4", "--min-lr", "4e-5")


def tool(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(ROOT / name), *arguments], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's text and tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    source = ["--input", sysconfig.get_path("stdlib"), "--glob", "*.py", "--exclude"]
    source += ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"]
    tokenizer = ["--output", str(folder / "tokenizer"), "--vocab-size", "2048"]
    tool("tools/train_tokenizer.py", *source, *tokenizer, "--type", "sentencepiece")
    encoding = ["--tokenizer-type", "SentencePieceTokenizer", "--append-eod"]
    encoding += ["--tokenizer-model", str(folder / "tokenizer")]
    tool("tools/preprocess_data.py", *source, "--output-prefix", str(folder / "stdlib"), *encoding)
    return folder


def made(training: float, validation: float = 4.0, not_fp8: int = 0) -> dict[str, float]:
    return {
        "training loss": training,
        "validation loss": validation,
        "linears not FP8": not_fp8,
    }


@pytest.mark.parametrize(
    ("track", "good"),
    [
        (made(3.51), True),
        (made(3.49), True),
        (made(3.54), False),
        (made(3.46), False),
        (made(3.5, 4.05), False),
        (made(math.nan), False),
        (made(3.5, not_fp8=1), False),
    ],
)
def test_a_track_has_to_be_fp8_and_near_its_control(track: dict[str, float], good: bool) -> None:
    control = {"bf16": made(3.5, not_fp8=16), "wires-none": made(9.0, 9.0)}
    lines, found = fp8_loss.table(control | {"mxfp8-e4m3": track})
    assert found == good
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| bf16",
        "| mxfp8-e4m3",
        "| wires-none",
    ]


def test_what_runs_is_what_is_asked_for_and_not_there_yet_and_its_control() -> None:
    assert fp8_loss.wanted_tracks(["wires-all"], {}) == ["wires-none", "wires-all"]
    assert fp8_loss.wanted_tracks(["wires-all"], {"wires-none": made(1.0)}) == ["wires-all"]
    assert fp8_loss.wanted_tracks(["bf16"], {"delayed-e4m3": made(1.0)}) == ["bf16"]
    assert fp8_loss.wanted_tracks(["recipes"], {}) == list(fp8_loss.OF_RECIPES)


@pytest.mark.slow
def test_fp8_is_within_one_percent_of_bf16_after_300_iterations(corpus: Path) -> None:
    """The quickstart itself."""
    tool("tests/tools/fp8_loss.py", "--data", str(corpus), "--ranks", "4")


@pytest.mark.slow
def test_every_recipe_is_within_one_percent_of_bf16_after_300_iterations(corpus: Path) -> None:
    tracks = ["--tracks", "recipes", "--global-batch-size", "4", *CALM]
    tool("tests/tools/fp8_loss.py", "--data", str(corpus), *tracks)


@pytest.mark.slow
def test_fp8_wires_are_within_one_percent_of_none_after_300_iterations(corpus: Path) -> None:
    tracks = ["--tracks", "wires-grad-reduce", "wires-all", "--global-batch-size", "8", *CALM]
    tool("tests/tools/fp8_loss.py", "--data", str(corpus), *tracks)
