"""Safetensors files: read through the library, written as a stream.

The library's writer wants all tensors of a file in memory. The form is simple (a length, a JSON
header, the bytes), so the writer here sends the header first and then one tensor after another;
the library reads the result back when the conversion is verified.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megafp8.checkpoint.tensor_file import buffer_of
from megafp8.convert.hf_fields import read_json
from megafp8.convert.hf_names import is_buffer
from megafp8.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SCALES_NAME = "fp8_scales.safetensors"  # of an export with `--fp8 scales`
CODES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
PLAIN = "F32, BF16, F16"  # of a model to convert; FP8 is an export's own
_NAMES = {dtype: code for code, dtype in CODES.items()}


@dataclass(frozen=True)
class Described:
    """Shape and dtype of a tensor that is still in its file, or not made yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFolder:
    """The tensors of a Hugging Face folder by name.

    Args:
        folder: where its files lie.
        only: this one of them alone.

    Attributes:
        entries: name -> shape and dtype; without the constants that `is_buffer` knows.

    Raises:
        CheckpointError: naming the file that is missing, damaged or contradicts the index.
    """

    def __init__(self, folder: Path, only: str | None = None) -> None:
        self.folder = folder
        self.entries: dict[str, Described] = {}
        self._owner = _weight_map(folder) if only is None else _names_in(folder, only)
        self._files = {owner: _open(folder / owner) for owner in set(self._owner.values())}
        for owner, file in sorted(self._files.items()):
            stored = set(file.keys())
            listed = {name for name, named in self._owner.items() if named == owner}
            if listed - stored:
                raise CheckpointError(
                    f"{folder / owner} lacks {_some(listed - stored)}, which {INDEX_NAME} names"
                )
            if stored - listed:
                raise CheckpointError(
                    f"{folder / INDEX_NAME} does not name {_some(stored - listed)} of {owner}"
                )
        for name, owner in self._owner.items():
            if is_buffer(name):
                continue
            part = self._files[owner].get_slice(name)
            code = part.get_dtype()
            if code not in CODES:
                raise CheckpointError(f"{folder / owner}: {name} is {code}, allowed {PLAIN}")
            self.entries[name] = Described(tuple(part.get_shape()), CODES[code])

    @property
    def files(self) -> Collection[str]:
        """Names of the files that hold them."""
        return self._files.keys()

    @property
    def names(self) -> list[str]:
        """Names of all that is stored."""
        return list(self._owner)

    def read(self, name: str) -> Tensor:
        """One tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        path = self.folder / self._owner[name]
        try:
            return self._files[self._owner[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if index.is_file():
        found = read_json(index).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise CheckpointError(f"{index}: weight_map is {found!r:.60}, expected names and files")
        for name, owner in found.items():
            if not isinstance(owner, str) or Path(owner).name != owner or len(owner) > 255:
                raise CheckpointError(f"{index}: {name} is in {owner!r:.60}, no name of a file")
        missing = {owner for owner in found.values() if not (folder / owner).is_file()}
        if missing:
            raise CheckpointError(f"{index} names files that are missing: {_some(missing)}")
        others = set(found.values()) - {SINGLE_NAME}
        if others and single.is_file():
            # transformers takes the first, other programs the second.
            raise CheckpointError(
                f"{folder} holds both {SINGLE_NAME} and {INDEX_NAME}, which names "
                f"{_some(others)}; allowed: one of them"
            )
        return found
    return _names_in(folder, SINGLE_NAME)


def _names_in(folder: Path, file: str) -> dict[str, str]:
    return {name: file for name in _open(folder / file).keys()}


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5])


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from None


class SafetensorsWriter:
    """One file, written tensor by tensor in the order that was announced.

    Args:
        path: a new file.
        entries: name -> shape and dtype, in the order of the `write` calls.
    """

    def __init__(self, path: Path, entries: Mapping[str, Described]) -> None:
        self.path, self._pending = path, dict(entries)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, entry in entries.items():
            end = offset + entry.nbytes
            header[name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the library aligns data to 8 bytes
        self._file = path.open("xb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor."""
        expected = next(iter(self._pending))
        entry = self._pending.pop(expected)
        assert (name, tuple(tensor.shape), tensor.dtype) == (expected, entry.shape, entry.dtype), (
            name,
            expected,
            tensor.shape,
            entry,
        )
        for piece in tensor.detach().contiguous().view(-1).split(1 << 24):
            self._file.write(memoryview(buffer_of(piece)))

    def close(self) -> None:
        """Finish the file and force it to storage."""
        assert not self._pending, f"{len(self._pending)} tensors were announced and not written"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close without finishing."""
        self._file.close()


def shard_names(count: int) -> list[str]:
    """File names of so many shards, as transformers names them."""
    if count == 1:
        return [SINGLE_NAME]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def into_shards(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Cut consecutive items into shards of at most `limit` bytes; a larger item gets its own."""
    start, filled = 0, 0
    for i, size in enumerate(sizes):
        if i > start and filled + size > limit:
            yield range(start, i)
            start, filled = i, 0
        filled += size
    if sizes:
        yield range(start, len(sizes))
