"""What a run reads is told by contents: a change is found, a place is none, the time is bounded."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.data.fingerprint import (
    BLOCK_BYTES,
    INDEX_BLOCKS,
    TOKEN_BLOCKS,
    block_starts,
    sampled_sha256,
    take_fingerprint,
)
from megafp8.data.indexed_dataset import IndexedDatasetWriter
from megafp8.data.loader import build_datasets
from tests.model.small import small_config
from tests.support.corpora import add_document


def write(prefix: Path, documents: list[np.ndarray]) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in documents:
            add_document(writer, document)


DOCUMENTS = [np.arange(number, number + 30) for number in range(20)]


def read(prefix: Path, **changes: Any) -> dict[str, Any]:
    data = {"mock_data": None, "data_path": (str(prefix),)}
    config = small_config(**{**data, **changes})
    return take_fingerprint(config, build_datasets(config))


def summed(fingerprint: dict[str, Any]) -> str:
    return fingerprint["corpora"]["data_path"]["sha256"]


def test_a_place_is_no_content(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    for suffix in (".bin", ".idx"):
        shutil.copy(tmp_path / f"a{suffix}", tmp_path / f"b{suffix}")
    found = [read(tmp_path / name)["corpora"]["data_path"] for name in "ab"]
    assert [one.pop("path") for one in found] == [str(tmp_path / name) for name in "ab"]
    assert found[0] == found[1]
    assert (found[0]["documents"], found[0]["tokens"]) == (20, 600)


def changed(number: int, position: int) -> list[np.ndarray]:
    documents = [document.copy() for document in DOCUMENTS]
    documents[number][position] += 1
    return documents


@pytest.mark.parametrize(
    "documents",
    [
        [*DOCUMENTS, DOCUMENTS[0]],
        DOCUMENTS[:-1],
        changed(0, 0),
        changed(10, 7),
        changed(19, 29),
        # The same stream of tokens, cut into other documents.
        [np.concatenate(DOCUMENTS)[:40], np.concatenate(DOCUMENTS)[40:]],
    ],
    ids=["grown", "shorter", "first token", "a token", "last token", "other borders"],
)
def test_a_change_is_found(tmp_path: Path, documents: list[np.ndarray]) -> None:
    write(tmp_path / "c", DOCUMENTS)
    before = read(tmp_path / "c")
    write(tmp_path / "c", documents)
    assert summed(read(tmp_path / "c")) != summed(before)


def test_splits_of_their_own_and_mock_data(tmp_path: Path) -> None:
    for name in "tv":
        write(tmp_path / name, DOCUMENTS)
    paths = {"train_data_path": (str(tmp_path / "t"),), "valid_data_path": (str(tmp_path / "v"),)}
    corpora = read(tmp_path, data_path=None, **paths)["corpora"]
    assert corpora.keys() == paths.keys()
    assert read(tmp_path, data_path=None, mock_data=True) == {"corpora": {}, "files": {}}


def test_a_tokenizer_is_its_file_and_what_it_says(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(60)} | {"<|endoftext|>": 60}
    content = {"model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    folder = tmp_path / "tok"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    write(tmp_path / "c", DOCUMENTS)
    kind = {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": None}

    def now(path: Path) -> dict[str, Any]:
        return read(tmp_path / "c", **kind, tokenizer_model=str(path))["files"]["tokenizer_model"]

    before = now(folder)
    assert (before["vocab_size"], before["eod"]) == (61, 60)
    assert before == now(folder / "tokenizer.json")  # the folder means that file
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w5"}))
    assert now(folder) == {**before, "eod": 5}
    words["w0"], words["w1"] = 1, 0
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert now(folder)["sha256"] != before["sha256"]


def test_merges_beside_a_vocabulary_count(tmp_path: Path) -> None:
    vocab = {token: number for number, token in enumerate([*"abcd", "ab", "cd", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    write(tmp_path / "c", [document % 7 for document in DOCUMENTS])
    kind = {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": None}
    sums = set()
    for merges in ("a b\nc d\n", "c d\na b\n"):
        (tmp_path / "merges.txt").write_text(merges)
        for path in (tmp_path, tmp_path / "vocab.json"):
            found = read(tmp_path / "c", **kind, tokenizer_model=str(path))["files"]
            sums.add(found["tokenizer_model"]["sha256"])
    assert len(sums) == 2


def test_other_files_that_numbers_follow_from(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("exclude: ['*.linear_fc2']\n")
    write(tmp_path / "c", DOCUMENTS)
    settings = {"bf16": True, "fp8_format": "hybrid", "precision_policy": str(policy)}
    before = read(tmp_path / "c", **settings)["files"]
    policy.write_text("exclude: ['*.linear_fc1']\n")
    after = read(tmp_path / "c", **settings)["files"]
    assert before.keys() == after.keys() == {"precision_policy"}
    assert before["precision_policy"]["sha256"] != after["precision_policy"]["sha256"]


@pytest.mark.parametrize("blocks", [TOKEN_BLOCKS, INDEX_BLOCKS])
def test_of_a_file_of_terabytes_some_blocks_are_read(tmp_path: Path, blocks: int) -> None:
    """A sparse one. Its ends are read, and its length counts."""
    path, size = tmp_path / "large", 3 << 40
    path.touch()
    os.truncate(path, size)
    assert len(block_starts(size, blocks)) == blocks
    found = [sampled_sha256(path, blocks)]
    for position in (0, size - 1):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"1")
        found.append(sampled_sha256(path, blocks))
    os.truncate(path, size - BLOCK_BYTES)
    found.append(sampled_sha256(path, blocks))
    assert len(set(found)) == 4


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 4 * BLOCK_BYTES, 4 * BLOCK_BYTES + 1])
def test_of_a_small_file_all_is_read(size: int) -> None:
    starts = block_starts(size, 4)
    read = {byte for start in starts for byte in (start, min(start + BLOCK_BYTES, size) - 1)}
    whole = size <= 4 * BLOCK_BYTES
    assert starts == list(range(0, size, BLOCK_BYTES)) if whole else len(starts) == 4
    assert size == 0 or {0, size - 1} <= read
