"""Tensors into one DCP file, each made when its turn comes and dropped after it is written."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from megafp8.checkpoint.writer import ChecksumStream, save_tensor
from megafp8.convert.items import Item
from megafp8.convert.routes import Described

FILE_NAME = "__0_0.distcp"
# A tensor's name -> its stored name, and the row of that one which it is; None for all of it.
Place = Callable[[str], tuple[str, int | None]]


def _item(stored: str, row: int | None, entry: Described, rows: int) -> WriteItem:
    shape, sizes, offsets = entry.shape, entry.shape, (0,) * len(entry.shape)
    if row is not None:
        shape, sizes, offsets = (rows, *shape), (1, *sizes), (row, *offsets)
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return WriteItem(
        index=MetadataIndex(stored, torch.Size(offsets)),
        type=WriteItemType.TENSOR if sizes == shape else WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=entry.dtype), torch.Size(shape)),
    )


def write_dcp(
    directory: Path,
    items: Sequence[Item],
    advance: Callable[[int], None],
    place: Place = lambda name: (name, None),
    rows: int = 0,
    objects: Mapping[str, bytes] | None = None,
) -> Mapping[str, FileEntry]:
    """Write `.metadata` and one shard into an existing directory.

    Args:
        directory: where to.
        items: what is written, in order.
        advance: told the bytes of each item.
        place: where a tensor goes; together the tensors fill every stored one.
        rows: of each stored tensor that is filled row by row.
        objects: name -> bytes that are stored beside the tensors as they are.

    Returns:
        The files written, with sizes and checksums.

    Raises:
        OSError: a file could not be written.
    """
    # DCP's own writer keeps every tensor of a file until the file is closed.
    objects, storage = objects or {}, {}
    planned = [
        _item(*place(name), entry, rows) for item in items for name, entry in item.entries.items()
    ]
    planned += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]
    planner = DefaultSavePlanner(flatten_state_dict=False)
    (plan,), metadata = planner.create_global_plan([SavePlan(planned)])
    order = iter(plan.items)
    with _summed(directory / FILE_NAME) as (file, entry_of_shard):

        def put(name: str, content: Tensor | bytes) -> None:
            start = file.tell()
            if isinstance(content, bytes):
                file.write(content)
            else:
                save_tensor(content if place(name)[1] is None else content[None], file)
            storage[next(order).index] = _StorageInfo(FILE_NAME, start, file.tell() - start)

        for item in items:
            item.write(put)
            advance(item.nbytes)
        for name, content in objects.items():
            put(name, content)
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
