"""Tensors into one DCP file, each made when its turn comes and dropped after it is written."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megafp8.checkpoint.agree import describe_dcp
from megafp8.checkpoint.record import FileEntry
from megafp8.checkpoint.writing import ShardWriter
from megafp8.errors import CheckpointError


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


class _Planner(DefaultSavePlanner):
    """Plans pieces that hold no values yet, and asks for each when it is to be written."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        produce: Callable[[Piece], Tensor],
        objects: Mapping[str, bytes],
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = {piece.index: piece for piece in pieces}
        self._produce, self._objects = produce, objects

    def create_local_plan(self) -> SavePlan:
        """One item for each piece and object, in order."""
        items = [_item(piece) for piece in self._pieces.values()]
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The values of one item; DCP calls it in the file's order and keeps nothing."""
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[write_item.index.fqn])
        piece = self._pieces[write_item.index]
        tensor = self._produce(piece).contiguous()
        assert (tuple(tensor.shape), tensor.dtype) == (piece.sizes, piece.dtype), piece
        return tensor


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
        CheckpointError: what `produce` raised, or the file could not be written.
    """
    writer = ShardWriter(directory)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(
                {},
                storage_writer=writer,
                planner=_Planner(pieces, produce, objects or {}),
                no_dist=True,
            )
    except CheckpointException as failure:
        raise CheckpointError(f"writing {directory}: {describe_dcp(failure, 1)}") from failure
    return writer.entries
