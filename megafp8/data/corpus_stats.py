"""Numbers about a corpus that put a loss into perspective."""

from pathlib import Path

import numpy as np

from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.errors import DataError

_BLOCK = 1 << 22  # tokens counted at once: 32 MiB as int64


def token_counts(
    dataset: IndexedDataset | str | Path, documents: range | None = None
) -> np.ndarray:
    """Count how often each id occurs.

    Args:
        dataset: Opened dataset, or its prefix.
        documents: Consecutive documents; None takes all.

    Returns:
        int64 [largest id + 1].

    Raises:
        DataError: The dataset cannot be opened, or holds a negative id.
    """
    data = dataset if isinstance(dataset, IndexedDataset) else IndexedDataset(dataset)
    documents = range(len(data)) if documents is None else documents
    stop = data.sequence_start(documents.stop)
    counts = np.zeros(0, dtype=np.int64)
    for start in range(data.sequence_start(documents.start), stop, _BLOCK):
        block = data.tokens(start, min(start + _BLOCK, stop))
        if block.min() < 0:
            raise DataError(f"{data.prefix}: holds token id {block.min()}, expected none below 0")
        found = np.bincount(block, minlength=counts.size)
        found[: counts.size] += counts
        counts = found
    return counts


def unigram_entropy(dataset: IndexedDataset | str | Path, documents: range | None = None) -> float:
    """Return the entropy of the token frequencies, in nats.

    It is the loss of the best model that ignores context: a model whose loss is not below it has
    learned frequencies alone.

    Raises:
        DataError: The documents hold no token.
    """
    counts = token_counts(dataset, documents)
    total = int(counts.sum())
    if total == 0:
        prefix = dataset.prefix if isinstance(dataset, IndexedDataset) else dataset
        raise DataError(f"{prefix}: no tokens, so there is no entropy")
    frequencies = counts[counts > 0] / total
    # Adding 0.0 turns the -0.0 of a single token into 0.0.
    return float(-(frequencies * np.log(frequencies)).sum()) + 0.0
