"""Tensors of a DCP checkpoint one at a time, without a process group and without a model."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megafp8.errors import CheckpointError


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

    def _chunk(self, name: str, offsets: torch.Size) -> Tensor:
        info = self.metadata.storage_data[MetadataIndex(name, offsets)]
        path = self.directory / info.relative_path
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                data = io.BytesIO(file.read(info.length))
            value = torch.load(data, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            text = " ".join(str(error).split())[:200]
            raise CheckpointError(f"{path}: {name} cannot be read: {text}") from None
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name} is {type(value).__name__}, expected a tensor")
        return value
