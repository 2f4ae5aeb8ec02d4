"""The tokenizer beside a model: taken into the configuration, or told why not."""

import json
import logging
from pathlib import Path

import pytest
import tokenizers
import torch
import yaml
from tokenizers import models, pre_tokenizers

from megafp8.convert.carried import data_section
from megafp8.data.tokenizers import EOD_TEXT, HuggingFaceTokenizer
from tests.convert.converted import run_convert
from tests.convert.hand_made import HIDDEN, make_folder, weights


def words(folder: Path, count: int) -> Path:
    """A word-level tokenizer.json of `count` ids."""
    vocab = {EOD_TEXT: 0, **{f"w{number}": number for number in range(1, count)}}
    tokenizers.Tokenizer(models.WordLevel(vocab, "w1")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    log = logging.getLogger("megafp8.convert.carried")
    monkeypatch.setattr(log, "warning", lambda text, *values: lines.append(text % values))
    return lines


@pytest.mark.parametrize(
    ("ids", "more", "room"),
    [
        (110, 10, "them, give the run this tokenizer, --vocab-size 110 and --new"),
        (200, 100, "them, convert with --make-vocab-size-divisible-by 256, then give the run"),
    ],
)
def test_ids_that_the_model_was_not_trained_with_are_counted(
    tmp_path: Path, told: list[str], ids: int, more: int, room: str
) -> None:
    assert data_section(words(tmp_path, ids), 100, 128) == {"vocab_size": 100}
    (line,) = told
    assert f"has {ids} ids, {more} more than the model, which nobody trained" in line
    assert room in line and line.endswith("--new-tokens-from-mean")


def test_state_in_the_file_is_told(tmp_path: Path, told: list[str]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(words(tmp_path, 90) / "tokenizer.json"))
    tokenizer.enable_truncation(16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert data_section(tmp_path, 100, 128)["tokenizer_type"] == "HuggingFaceTokenizer"
    (line,) = told
    assert line.endswith("since ids are those of the text: truncation (max_length 16)")


def test_gpt2s_pair_of_files_comes_along(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([EOD_TEXT, *alphabet, "he"])}
    tables = weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tables[name] = torch.randn(300, HIDDEN)
    source = make_folder(tmp_path / "gpt", tables, vocab_size=300)
    (source / "vocab.json").write_text(json.dumps(vocab))
    (source / "merges.txt").write_text("#version: 0.2\nh e\n")
    run_convert("hf", "megafp8", source, tmp_path / "out")
    data = yaml.safe_load((tmp_path / "out/config.yaml").read_text())["data"]
    assert data["tokenizer_type"] == "HuggingFaceTokenizer"
    tokenizer = HuggingFaceTokenizer(data["tokenizer_model"])
    assert tokenizer.encode("he") == [vocab["he"]] and tokenizer.eod == 0
