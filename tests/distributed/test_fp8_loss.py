"""FP8 reaches BF16's loss: the quickstart's model on the quickstart's data (about 10 minutes)."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.slow
def test_fp8_is_within_one_percent_of_bf16_after_300_iterations(corpus: Path) -> None:
    tool("tests/tools/fp8_loss.py", "--data", str(corpus), "--iterations", "300")


@pytest.mark.slow
def test_every_recipe_is_within_one_percent_of_bf16_after_300_iterations(corpus: Path) -> None:
    """At a learning rate at which two BF16 runs that round differently stay together."""
    small = ["--global-batch-size", "4", "--lr", "4e-4", "--min-lr", "4e-5"]
    tool("tests/tools/recipe_loss.py", "--data", str(corpus), "--iterations", "300", *small)
