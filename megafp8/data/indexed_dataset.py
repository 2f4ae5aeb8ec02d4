r"""Megatron's `.bin`/`.idx` pair: writer and checking memory-mapped reader.

Layout, as in megatron-core's `IndexedDatasetBuilder` (all little-endian, no padding):

    .idx  magic "MMIDIDX\0\0" (9 bytes) | version uint64 = 1 | dtype code uint8
          | sequences uint64 | length of the document index uint64
          | sequence lengths int32 [sequences] | byte offsets into .bin int64 [sequences]
          | document index int64 [documents + 1]
    .bin  the tokens of all sequences, one after the other

One document is one sequence here, as Megatron's preprocessing writes it.
"""

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megafp8.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = len(MAGIC) + 8 + 1 + 8 + 8

# Megatron's codes; 6 and 7 are float64 and float32, which cannot hold token ids.
DTYPE_OF_CODE: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

# Megatron switches to int32 at 65500 already, although 16 bits would do up to 65536.
UINT16_VOCABULARY_LIMIT = 65500

_CHECK_BLOCK = 1 << 20  # sequences checked at once when a dataset is opened: 12 MiB of index


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the token file of a prefix."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the index file of a prefix."""
    return Path(f"{prefix}.idx")


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the token width that Megatron takes: uint16 below 65500 ids, else int32.

    Args:
        vocab_size: Number of ids, added tokens included.
    """
    return np.dtype("<u2") if vocab_size < UINT16_VOCABULARY_LIMIT else np.dtype("<i4")


def encode_tokens(tokens: Sequence[int] | np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Return token ids in the stored width.

    Args:
        tokens: Ids, [n].
        dtype: One of `DTYPE_OF_CODE`.

    Returns:
        New array [n] of `dtype`.

    Raises:
        DataError: An id does not fit; a cast would wrap it to another id (65536 to 0 in 16 bits).
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        limits = np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            worst = low if low < limits.min else high
            raise DataError(
                f"token id {worst} does not fit {dtype.name} ({limits.min}..{limits.max})"
            )
    return ids.astype(dtype)


class IndexedDatasetWriter:
    """Writes one `.bin`/`.idx` pair under temporary names and renames it when it is complete.

    The index is renamed last and a dataset needs it to be opened, so nothing half-written is ever
    usable under the final name. Used as a context manager it commits on a normal exit and removes
    its temporary files on an exception.

    Args:
        prefix: Final path without `.bin`/`.idx`. An existing pair is replaced on commit.
        dtype: Stored width of a token, usually `optimal_dtype(vocab_size)`.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODE_OF_DTYPE:
            raise DataError(f"{self.prefix}: tokens cannot be stored as {self.dtype.name}")
        self.num_tokens = 0
        self._lengths = array("i")
        self._temporary = Path(f"{self.prefix}.tmp-{os.getpid()}")
        self._state = "open"
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = bin_path(self._temporary).open("wb")
        except FileExistsError:
            raise DataError(
                f"{self.prefix}: cannot write there: {self.prefix.parent} is a file, not a folder"
            ) from None
        except OSError as error:
            raise DataError(f"{self.prefix}: cannot write there: {error.strerror}") from error

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return len(self._lengths)

    def add_encoded(self, lengths: Sequence[int], payload: bytes) -> None:
        """Append documents whose tokens are already bytes of the stored width.

        Args:
            lengths: Tokens in each document.
            payload: Their tokens, one document after the other.
        """
        total = sum(lengths)
        assert total * self.dtype.itemsize == len(payload), (total, len(payload))
        try:
            self._lengths.extend(lengths)
        except OverflowError:
            raise DataError(f"{self.prefix}: a document is longer than 2**31 - 1 tokens") from None
        try:
            self._file.write(payload)
        except OSError as error:
            raise DataError(f"{self.prefix}.bin: cannot write: {error.strerror}") from error
        self.num_tokens += total

    def prepare(self) -> None:
        """Write the index, put both files on disk and read them back, still under temporary names.

        Raises:
            DataError: The files cannot be written, or do not hold what was added.
        """
        if self._state != "open":
            return
        try:
            _flush_to_disk(self._file)
            self._file.close()
            with idx_path(self._temporary).open("wb") as index:
                self._write_index(index)
                _flush_to_disk(index)
        except OSError as error:
            raise DataError(f"{self.prefix}: cannot write: {error.strerror}") from error
        written = IndexedDataset(self._temporary)
        if (len(written), written.num_tokens) != (self.num_documents, self.num_tokens):
            raise DataError(
                f"{self.prefix}: read back {len(written)} documents and {written.num_tokens} "
                f"tokens, wrote {self.num_documents} and {self.num_tokens}"
            )
        self._state = "prepared"

    def commit(self) -> None:
        """Move the checked files to their final names."""
        self.prepare()
        if self._state != "prepared":
            return
        try:
            # An old index beside a new .bin would be a mismatched pair, so it goes first.
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(bin_path(self._temporary), bin_path(self.prefix))
            os.replace(idx_path(self._temporary), idx_path(self.prefix))
        except OSError as error:
            raise DataError(f"{self.prefix}: cannot write: {error.strerror}") from error
        self._state = "done"

    def abort(self) -> None:
        """Remove the temporary files; after a commit it does nothing."""
        self._file.close()
        if self._state == "done":
            return
        self._state = "aborted"
        bin_path(self._temporary).unlink(missing_ok=True)
        idx_path(self._temporary).unlink(missing_ok=True)

    def _write_index(self, index: Any) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.intc).astype("<i4")
        pointers = np.zeros(lengths.size, dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        index.write(MAGIC)
        index.write(struct.pack("<QB", VERSION, CODE_OF_DTYPE[self.dtype]))
        index.write(struct.pack("<QQ", lengths.size, lengths.size + 1))
        index.write(lengths.tobytes())
        index.write(pointers.tobytes())
        index.write(np.arange(lengths.size + 1, dtype="<i8").tobytes())

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self.abort()


class IndexedDataset:
    """Reads a `.bin`/`.idx` pair through memory maps; everything is checked when it is opened.

    Attributes:
        prefix: Path without suffix.
        dtype: Width of a token, from the index's header.
        sequence_lengths: int32 [sequences].
        document_indices: int64 [documents + 1].
        num_tokens: Tokens of all sequences.

    Args:
        prefix: Path without `.bin`/`.idx`.

    Raises:
        DataError: A file is missing, truncated, of another format, or does not fit the other one.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        if self.prefix.suffix in (".bin", ".idx"):
            raise DataError(
                f"{prefix}: give the path without '{self.prefix.suffix}': "
                f"{self.prefix.with_suffix('')}"
            )
        self._idx_path, self._bin_path = idx_path(self.prefix), bin_path(self.prefix)
        idx_bytes, bin_bytes = _file_size(self._idx_path), _file_size(self._bin_path)
        sequences, documents = self._read_header(idx_bytes)
        self._map_index(sequences, documents)
        self.num_tokens = self._check_sequences()
        self._check_documents(sequences)
        expected = self.num_tokens * self.dtype.itemsize
        if bin_bytes != expected:
            raise DataError(
                f"{self._bin_path}: {bin_bytes} bytes, but {self._idx_path.name} describes "
                f"{expected} ({self.num_tokens} {self.dtype.name} tokens in {sequences} "
                "sequences): cut off, or not a pair"
            )
        # An empty file cannot be mapped.
        self._tokens = (
            np.memmap(self._bin_path, dtype=self.dtype, mode="r")
            if expected
            else np.empty(0, dtype=self.dtype)
        )

    def __len__(self) -> int:
        return int(self.sequence_lengths.size)

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens of one sequence: read-only view, [length], in the stored width."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)} in {self.prefix}")
        start = int(self._byte_offsets[index]) // self.dtype.itemsize
        return self.tokens(start, start + int(self.sequence_lengths[index]))

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return tokens [start, stop) of the whole stream: read-only view, in the stored width."""
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        return np.asarray(self._tokens[start:stop])

    def sequence_start(self, index: int) -> int:
        """Return where sequence `index` starts in the stream; `len(self)` gives its end."""
        if index == len(self):
            return self.num_tokens
        return int(self._byte_offsets[index]) // self.dtype.itemsize

    def sequence_at(self, token: int) -> int:
        """Return the sequence that holds token `token` of the stream (empty ones hold none)."""
        assert 0 <= token < self.num_tokens, (token, self.num_tokens)
        return int(np.searchsorted(self._byte_offsets, token * self.dtype.itemsize, "right")) - 1

    def _read_header(self, idx_bytes: int) -> tuple[int, int]:
        path = self._idx_path
        with path.open("rb") as index:
            header = index.read(HEADER_BYTES)
        magic = header[: len(MAGIC)]
        if magic != MAGIC and len(header) >= len(MAGIC):
            raise DataError(f"{path}: magic {magic!r}, expected {MAGIC!r}")
        if len(header) < HEADER_BYTES:
            raise DataError(f"{path}: {idx_bytes} bytes, expected at least {HEADER_BYTES}")
        version, code = struct.unpack_from("<QB", header, len(MAGIC))
        if version != VERSION:
            raise DataError(f"{path}: version {version}, expected {VERSION}")
        if code not in DTYPE_OF_CODE:
            allowed = ", ".join(f"{key} {dtype.name}" for key, dtype in DTYPE_OF_CODE.items())
            raise DataError(f"{path}: dtype code {code}, expected one of {allowed}")
        self.dtype = DTYPE_OF_CODE[code]
        sequences, documents = struct.unpack_from("<QQ", header, len(MAGIC) + 9)
        expected = HEADER_BYTES + 12 * sequences + 8 * documents
        if idx_bytes != expected:
            # Multimodal datasets append one int8 mode a sequence.
            multimodal = idx_bytes == expected + sequences
            note = " (multimodal datasets cannot be read)" if multimodal else ""
            raise DataError(
                f"{path}: {idx_bytes} bytes, expected {expected} for {sequences} sequences and "
                f"{documents} document entries{note}"
            )
        return sequences, documents

    def _map_index(self, sequences: int, documents: int) -> None:
        index = np.memmap(self._idx_path, dtype=np.uint8, mode="r")
        offset = HEADER_BYTES
        self.sequence_lengths = np.frombuffer(index, "<i4", sequences, offset)
        offset += 4 * sequences
        self._byte_offsets = np.frombuffer(index, "<i8", sequences, offset)
        offset += 8 * sequences
        self.document_indices = np.frombuffer(index, "<i8", documents, offset)

    def _check_sequences(self) -> int:
        """Check that the sequences follow each other without gaps; return their tokens."""
        total, width = 0, self.dtype.itemsize
        for start in range(0, len(self), _CHECK_BLOCK):
            lengths = self.sequence_lengths[start : start + _CHECK_BLOCK].astype(np.int64)
            ends = total + np.cumsum(lengths)
            wrong = self._byte_offsets[start : start + _CHECK_BLOCK] != (ends - lengths) * width
            wrong |= lengths < 0
            if wrong.any():
                first = int(wrong.argmax())
                raise DataError(
                    f"{self._idx_path}: sequence {start + first} has length {lengths[first]} and "
                    f"byte offset {self._byte_offsets[start + first]}, expected offset "
                    f"{(ends[first] - lengths[first]) * width}: damaged index"
                )
            total = int(ends[-1])
        return total

    def _check_documents(self, sequences: int) -> None:
        indices = self.document_indices
        if not (
            indices.size
            and indices[0] == 0
            and indices[-1] == sequences
            and bool((indices[1:] >= indices[:-1]).all())
        ):
            ends = f"{indices[0]}..{indices[-1]}" if indices.size else "empty"
            raise DataError(
                f"{self._idx_path}: document index is {ends}, expected to rise from 0 to "
                f"{sequences}: damaged index"
            )


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        likely = path.with_name(f"{path.stem}_text_document{path.suffix}")
        hint = f"; did you mean {likely.with_suffix('')}?" if likely.exists() else ""
        if (text := path.with_suffix("")).is_file():
            hint = f"; {text} is a file of its own, encode it with tools/preprocess_data.py"
        raise DataError(f"{path}: cannot be opened: {error.strerror}{hint}") from error


def _flush_to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
