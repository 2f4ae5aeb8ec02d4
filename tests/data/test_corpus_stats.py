"""Unigram entropy of a corpus against values worked out by hand."""

import math

import numpy as np
import pytest

from megafp8.data.corpus_stats import unigram_entropy
from megafp8.data.indexed_dataset import IndexedDatasetWriter
from megafp8.errors import DataError
from tests.support.corpora import add_document


def write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            add_document(writer, document)
    return prefix


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_entropy_by_hand(tmp_path, dtype):
    prefix = write(tmp_path / "d", [[3, 3], [], [7, 9]], dtype)
    assert unigram_entropy(prefix) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy(write(tmp_path / "one", [[3, 3]], dtype)) == 0.0


def test_counting_in_blocks_changes_nothing(tmp_path, monkeypatch):
    prefix = write(tmp_path / "d", [list(range(50)), [99] * 7, [3]])
    together = unigram_entropy(prefix)
    monkeypatch.setattr("megafp8.data.corpus_stats._BLOCK", 4)
    assert unigram_entropy(prefix) == together


def test_no_tokens(tmp_path):
    with pytest.raises(DataError, match="no tokens"):
        unigram_entropy(write(tmp_path / "d", [[]]))


def test_negative_ids(tmp_path):
    with pytest.raises(DataError, match="token id -5"):
        unigram_entropy(write(tmp_path / "d", [[1, -5]], np.int32))
