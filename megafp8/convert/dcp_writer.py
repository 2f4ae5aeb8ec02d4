"""Tensors into one DCP file, each made when its turn comes and dropped after it is written."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megafp8.checkpoint.files import METADATA_NAME
from megafp8.checkpoint.record import FileEntry
from megafp8.checkpoint.streaming import save_tensor
from megafp8.checkpoint.writing import ChecksumStream

FILE_NAME = "__0_0.distcp"


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor, written at once.

    Attributes:
        name: of the tensor.
        shape: of the whole tensor.
        dtype: of both.
        offsets: of the part's first element.
        sizes: of the part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Piece:
        """A tensor in one piece."""
        return cls(name, shape, dtype, (0,) * len(shape), shape)

    @property
    def index(self) -> MetadataIndex:
        """DCP's key of it."""
        return MetadataIndex(self.name, torch.Size(self.offsets))


def _item(piece: Piece) -> WriteItem:
    whole = piece.sizes == piece.shape
    chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
    return WriteItem(
        index=piece.index,
        type=WriteItemType.TENSOR if whole else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk, TensorProperties(dtype=piece.dtype), torch.Size(piece.shape)
        ),
    )


def write_dcp(
    directory: Path,
    pieces: Sequence[Piece],
    produce: Callable[[Piece], Tensor],
    objects: Mapping[str, bytes] | None = None,
) -> Mapping[str, FileEntry]:
    """Write `.metadata` and one shard into an existing directory.

    Args:
        directory: where to.
        pieces: together they fill every tensor that they name.
        produce: piece -> its values.
        objects: name -> bytes that are stored beside the tensors as they are.

    Returns:
        The files written, with sizes and checksums.

    Raises:
        OSError: a file could not be written.
    """
    # DCP's own writer keeps every tensor of a file until the file is closed.
    items = [_item(piece) for piece in pieces]
    items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects or {}]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    (plan,), metadata = planner.create_global_plan([SavePlan(items)])
    by_index, storage = {piece.index: piece for piece in pieces}, {}
    with _summed(directory / FILE_NAME) as (file, entry_of_shard):
        for item in plan.items:
            start = file.tell()
            if item.type == WriteItemType.BYTE_IO:
                file.write((objects or {})[item.index.fqn])
            else:
                piece = by_index[item.index]
                tensor = produce(piece)
                assert (tuple(tensor.shape), tensor.dtype) == (piece.sizes, piece.dtype), piece
                save_tensor(tensor, file)
                del tensor  # else it is there while the next one is made
            storage[item.index] = _StorageInfo(FILE_NAME, start, file.tell() - start)
    metadata.storage_data, metadata.storage_meta = storage, StorageMeta()
    metadata.version = CURRENT_DCP_VERSION
    with _summed(directory / METADATA_NAME) as (file, entry_of_index):
        file.write(pickle.dumps(metadata))
    return {FILE_NAME: entry_of_shard(), METADATA_NAME: entry_of_index()}


@contextmanager
def _summed(path: Path) -> Iterator[tuple[Any, Callable[[], FileEntry]]]:
    """A new file, on storage when the block ends, and what tells its size and checksum."""
    with path.open("xb") as file:
        stream = ChecksumStream(file)
        yield stream, stream.entry
        os.fsync(stream.fileno())
