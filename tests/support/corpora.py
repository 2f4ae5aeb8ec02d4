"""Small corpora for tests."""

from collections.abc import Sequence

import numpy as np

from megafp8.data.indexed_dataset import IndexedDatasetWriter, encode_tokens


def add_document(writer: IndexedDatasetWriter, tokens: Sequence[int] | np.ndarray) -> None:
    """Append one document (may be empty)."""
    encoded = encode_tokens(tokens, writer.dtype)
    writer.add_encoded([encoded.size], encoded.tobytes())
