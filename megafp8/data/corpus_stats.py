"""Numbers about a corpus that put a loss into perspective."""

from pathlib import Path

import numpy as np

from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.errors import DataError

_BLOCK = 1 << 22  # tokens counted at once: 32 MiB as int64


def unigram_entropy(prefix: str | Path) -> float:
    """Return the entropy of the token frequencies of a corpus, in nats.

    It is the loss of the best model that ignores context: a model whose loss is not below it has
    learned frequencies alone.

    Raises:
        DataError: The corpus cannot be opened, holds no token or a negative id.
    """
    data = IndexedDataset(prefix)
    if data.num_tokens == 0:
        raise DataError(f"{prefix}: no tokens, so there is no entropy")
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, data.num_tokens, _BLOCK):
        block = data.tokens(start, min(start + _BLOCK, data.num_tokens))
        if block.min() < 0:
            raise DataError(f"{prefix}: holds token id {block.min()}, expected none below 0")
        found = np.bincount(block, minlength=counts.size)
        found[: counts.size] += counts
        counts = found
    frequencies = counts[counts > 0] / data.num_tokens
    # Adding 0.0 turns the -0.0 of a single token into 0.0.
    return float(-(frequencies * np.log(frequencies)).sum()) + 0.0
