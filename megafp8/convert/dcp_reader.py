"""Tensors of a DCP checkpoint one at a time, without a process group and without a model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megafp8.errors import CheckpointError


def reason_of(error: Exception) -> str:
    """Return an error of `torch.load` in one line, without its advice to load without care."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if "weights_only" in text or "Weights only" in text:
        return f"{type(error).__name__}: damaged, or it names what is no data"
    return text[:200]


def is_empty(value: object) -> bool:
    """Tell whether a module's extra state is none: None, no elements, or a list of such."""
    if isinstance(value, (list, tuple)):
        return all(is_empty(item) for item in value)
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Tell whether a pickled value is a tensor whose elements are all in memory, one by one."""
    # Pickles also hold sparse and quantized tensors, and ones without data.
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.device.type == "cpu" and not value.is_quantized


class DcpTensors:
    """Reads whole tensors, chunk by chunk; memory is the tensor and one chunk of it.

    Args:
        directory: of the checkpoint.
        metadata: its index, checked (`megafp8.checkpoint.metadata`).
    """

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        self.directory, self.metadata = directory, metadata

    def read(self, name: str, row: int | None = None) -> Tensor:
        """One tensor.

        Args:
            name: as stored.
            row: of a stacked tensor, only this index of the first dimension.

        Raises:
            CheckpointError: a file cannot be read, or holds something else than the index says.
        """
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), name
        size = tuple(entry.size) if row is None else tuple(entry.size[1:])
        whole = torch.empty(size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            if row is not None and not offsets[0] <= row < offsets[0] + sizes[0]:
                continue
            part = self._chunk(name, chunk.offsets)
            if part.shape != chunk.sizes or part.dtype != entry.properties.dtype:
                raise CheckpointError(
                    f"{self.directory}: a chunk of {name} is {part.dtype}{list(part.shape)}, its "
                    f"index says {entry.properties.dtype}{sizes}"
                )
            if row is not None:
                part = part[row - offsets[0]]
                offsets, sizes = offsets[1:], sizes[1:]
            slices = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
            whole[slices] = part
        return whole

    def holds_data(self, place: _StorageInfo) -> bool:
        """Tell whether a stored object (no tensor) is more than None or an empty tensor."""
        try:
            value = torch.load(self._bytes(place), "cpu", weights_only=True)
        except Exception:  # an object of a class that is not read here is no empty one
            return True
        return not is_empty(value)

    def _bytes(self, place: _StorageInfo) -> io.BytesIO:
        with (self.directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))

    def _chunk(self, name: str, offsets: torch.Size) -> Tensor:
        place = self.metadata.storage_data[MetadataIndex(name, offsets)]
        path = self.directory / place.relative_path
        try:
            value = torch.load(self._bytes(place), map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes raise nearly any type
            raise CheckpointError(f"{path}: {name} cannot be read: {reason_of(error)}") from None
        if not is_plain(value):
            raise CheckpointError(
                f"{path}: {name} is {type(value).__name__}, expected a dense tensor"
            )
        return value
