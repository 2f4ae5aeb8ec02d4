"""FP8 reaches BF16's loss: the quickstart's model on the quickstart's data (about 10 minutes)."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(ROOT / name), *arguments], check=True, cwd=ROOT)


@pytest.mark.slow
def test_fp8_is_within_one_percent_of_bf16_after_300_iterations(tmp_path: Path) -> None:
    source = ["--input", sysconfig.get_path("stdlib"), "--glob", "*.py", "--exclude"]
    source += ["site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"]
    tokenizer = ["--output", str(tmp_path / "tokenizer"), "--vocab-size", "2048"]
    tool("tools/train_tokenizer.py", *source, *tokenizer, "--type", "sentencepiece")
    encoding = ["--tokenizer-type", "SentencePieceTokenizer", "--append-eod"]
    encoding += ["--tokenizer-model", str(tmp_path / "tokenizer")]
    tool(
        "tools/preprocess_data.py", *source, "--output-prefix", str(tmp_path / "stdlib"), *encoding
    )
    tool("tests/tools/fp8_loss.py", "--data", str(tmp_path), "--iterations", "300")
