"""Safetensors files: read through the library, written as a stream.

The library's writer wants all tensors of a file in memory. The form is simple (a length, a JSON
header, the bytes), so the writer here sends the header first and then one tensor after another;
the library reads the result back when the conversion is verified.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megafp8.checkpoint.tensors import buffer_of
from megafp8.convert.hf_fields import read_json
from megafp8.convert.hf_names import is_buffer
from megafp8.convert.items import Item
from megafp8.convert.routes import Described
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
        indexed = only is None and (folder / INDEX_NAME).is_file()
        self._owner = _weight_map(folder) if indexed else {}
        owners = set(self._owner.values()) if indexed else {only or SINGLE_NAME}
        self._files = {owner: _open(folder / owner) for owner in sorted(owners)}
        for owner, file in self._files.items():
            stored = set(file.keys())
            listed = {name for name, named in self._owner.items() if named == owner}
            if not indexed:
                self._owner = dict.fromkeys(file.keys(), owner)
            elif listed - stored:
                raise CheckpointError(
                    f"{folder / owner} lacks {_some(listed - stored)}, which {INDEX_NAME} names"
                )
            elif stored - listed:
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
        owner = self._owner[name]
        try:
            return self._files[owner].get_tensor(name)
        except (SafetensorError, OSError) as error:
            path = self.folder / owner
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, as the index says."""
    index = folder / INDEX_NAME
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
    if others and (folder / SINGLE_NAME).is_file():
        # transformers takes the first, other programs the second.
        raise CheckpointError(
            f"{folder} holds both {SINGLE_NAME} and {INDEX_NAME}, which names "
            f"{_some(others)}; allowed: one of them"
        )
    return found


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5])


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from None


def write_safetensors(path: Path, items: Sequence[Item], advance: Callable[[int], None]) -> None:
    """Write one file, tensor by tensor, and force it to storage.

    Args:
        path: a new file.
        items: what it holds, in order.
        advance: told the bytes of each item.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in (pair for item in items for pair in item.entries.items()):
        header[name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the library aligns data to 8 bytes
    with path.open("xb") as file:

        def put(_: str, tensor: Tensor) -> None:
            for piece in tensor.detach().contiguous().view(-1).split(1 << 24):
                file.write(memoryview(buffer_of(piece)))

        file.write(struct.pack("<Q", len(text)) + text)
        for item in items:
            item.write(put)
            advance(item.nbytes)
        file.flush()
        os.fsync(file.fileno())


def into_shards(items: Iterable[Item], limit: int) -> dict[str, list[Item]]:
    """Cut a model into files of at most `limit` bytes, as transformers names them.

    A larger item gets a file of its own.
    """
    shards: list[list[Item]] = []
    filled = 0
    for item in items:
        if not shards or filled + item.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.nbytes
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
