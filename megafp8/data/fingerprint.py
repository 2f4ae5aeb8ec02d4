"""What a run reads, told by contents: corpora, tokenizer and other files that it names.

Stored in each checkpoint, so that a run that goes on finds what has changed behind an equal path,
and nothing where files have only moved. The time is bounded: of a large file blocks are read at
equal distances, its first and last ones among them. Of the index of a corpus more is read: each of
its offsets follows from all lengths before it, so what was put in, taken out or encoded otherwise
moves everything behind it.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from megafp8.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megafp8.data.loader import Datasets

BLOCK_BYTES = 1 << 17
TOKEN_BLOCKS = 128  # a .bin of up to 16 MiB is read whole
INDEX_BLOCKS = 512  # an .idx of up to 64 MiB, which is 3 million documents

# Files whose contents a run follows, beside a tokenizer's.
_NAMED_FILES = (
    ("precision", "precision_policy"),
    ("parallel", "tp_comm_overlap_cfg"),
)


def take_fingerprint(config: Any, datasets: Datasets) -> dict[str, Any]:
    """Return what a run reads, as values of JSON.

    Args:
        config: The `RunConfig`.
        datasets: Opened from it.

    Returns:
        `corpora` and `files`, each by the field that names the file: `path` (absolute), `sha256`,
        and of a corpus `documents` and `tokens`, of a tokenizer `vocab_size` and `eod`.

    Raises:
        OSError: A file is gone.
    """
    files = {}
    for section, field in _NAMED_FILES:
        path = getattr(getattr(config, section), field)
        if path is not None:
            files[field] = _files(Path(path))
    tokenizer = datasets.tokenizer
    if tokenizer is not None and tokenizer.files:
        facts = {"vocab_size": tokenizer.vocab_size, "eod": tokenizer.eod}
        files["tokenizer_model"] = _files(*tokenizer.files) | facts
    return {
        "corpora": {field: _corpus(corpus) for field, corpus in datasets.corpora.items()},
        "files": files,
    }


def _corpus(corpus: IndexedDataset) -> dict[str, Any]:
    sums = [
        sampled_sha256(idx_path(corpus.prefix), INDEX_BLOCKS),
        sampled_sha256(bin_path(corpus.prefix), TOKEN_BLOCKS),
    ]
    return {
        "path": str(corpus.prefix.absolute()),
        "documents": len(corpus),
        "tokens": corpus.num_tokens,
        "sha256": _joined(sums),
    }


def _files(path: Path, *others: Path) -> dict[str, Any]:
    sums = [sampled_sha256(file, INDEX_BLOCKS) for file in (path, *others)]
    return {"path": str(path.absolute()), "sha256": _joined(sums)}


def _joined(sums: list[str]) -> str:
    return hashlib.sha256(" ".join(sums).encode()).hexdigest()


def sampled_sha256(path: Path, blocks: int) -> str:
    """Return a hash of a file's size and of its contents, of which at most `blocks` are read.

    Args:
        path: The file; one of up to `blocks` * `BLOCK_BYTES` bytes is read whole.
        blocks: At least 2.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        found = hashlib.sha256(str(size).encode())
        for start in block_starts(size, blocks):
            file.seek(start)
            found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()


def block_starts(size: int, blocks: int) -> list[int]:
    """Return where the blocks begin that are read of a file of `size` bytes, both ends included."""
    if size <= blocks * BLOCK_BYTES:
        return list(range(0, size, BLOCK_BYTES))
    return [i * (size - BLOCK_BYTES) // (blocks - 1) for i in range(blocks)]
