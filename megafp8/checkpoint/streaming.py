"""Tensors of a checkpoint one at a time: read in one process, written as many ranks would.

No process group and no device are needed, and no more of the model is in memory than the largest
tensor and a buffer. Reading is DCP's own; the split of tensors over files is DCP's own planning of
what each rank of the target layout would save.
"""

import os
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
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
from megafp8.checkpoint.record import FileEntry, TensorEntry
from megafp8.checkpoint.tensors import WORKERS, buffer_of, dtype_of
from megafp8.checkpoint.writing import ChecksumStream
from megafp8.errors import CheckpointError


@dataclass(frozen=True)
class Box:
    """A rectangular part of a global tensor; `sizes` may hold 0.

    Attributes:
        offsets: first element in each dimension.
        sizes: elements in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part as a view."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


# What one rank saves: name to its part, None for a tensor that it holds whole.
Holding = Mapping[str, Box | None]


def plan_shards(
    entries: Mapping[str, TensorEntry], holdings: Sequence[Holding]
) -> tuple[list[list[WriteItem]], Metadata]:
    """Return what each rank would write and DCP's index of it, without the places in the files.

    Tensors and parts that several ranks hold are written by one of them, as DCP chooses.

    Args:
        entries: all tensors.
        holdings: for each rank, what it holds.

    Raises:
        CheckpointError: the parts of a tensor do not fill it.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    plans = [
        SavePlan([_write_item(name, entries[name], box) for name, box in holding.items()])
        for holding in holdings
    ]
    try:
        final, metadata = planner.create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(f"the target layout does not hold every element: {error}") from error
    absent = sorted(set(entries) - set(metadata.state_dict_metadata))
    if absent:
        raise CheckpointError(f"no rank of the target layout holds {', '.join(absent[:5])}")
    return [plan.items for plan in final], metadata


def _write_item(name: str, entry: TensorEntry, box: Box | None) -> WriteItem:
    part = box or Box((0,) * len(entry.shape), entry.shape)
    offsets, sizes = torch.Size(part.offsets), torch.Size(part.sizes)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.TENSOR if box is None else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=dtype_of(entry)),
            size=torch.Size(entry.shape),
        ),
    )


class LayoutWriter:
    """Writes tensors into the files of a set of ranks, `__R_0.distcp`, and DCP's `.metadata`.

    Each file has one thread, which appends in the order of `write`: equal calls give equal files.
    """

    def __init__(
        self, directory: Path, entries: Mapping[str, TensorEntry], holdings: Sequence[Holding]
    ) -> None:
        """Plan the files.

        Args:
            directory: an empty folder.
            entries: all tensors that will be written.
            holdings: as in `plan_shards`.

        Raises:
            CheckpointError: as `plan_shards`.
        """
        self._directory = directory
        plans, self._metadata = plan_shards(entries, holdings)
        self._items: dict[str, list[tuple[int, WriteItem]]] = {name: [] for name in entries}
        for rank, items in enumerate(plans):
            for item in items:
                self._items[item.index.fqn].append((rank, item))
        ranks = sorted({rank for items in self._items.values() for rank, _ in items})
        self._files: dict[int, ChecksumStream] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._lanes = [ThreadPoolExecutor(1) for _ in range(min(WORKERS, len(ranks)))]
        self._lane_of = {rank: index % len(self._lanes) for index, rank in enumerate(ranks)}

    @staticmethod
    def _file_name(rank: int) -> str:
        return f"__{rank}_0.distcp"

    def write(self, name: str, tensor: Tensor) -> list[Future[None]]:
        """Write a whole tensor; returns at once, the tensor must stay as it is until all is done.

        Raises:
            CheckpointError: the tensor is not what was planned.
        """
        items = self._items.pop(name)
        for _, item in items:
            data = item.tensor_data
            assert data is not None
            if data.size != tensor.shape or data.properties.dtype != tensor.dtype:
                raise CheckpointError(
                    f"{name} is {tensor.dtype}{list(tensor.shape)}, planned was "
                    f"{data.properties.dtype}{list(data.size)}"
                )
        return [
            self._lanes[self._lane_of[rank]].submit(self._append, rank, item, tensor)
            for rank, item in items
        ]

    def _append(self, rank: int, item: WriteItem, tensor: Tensor) -> None:
        name = self._file_name(rank)
        if rank not in self._files:
            self._files[rank] = ChecksumStream((self._directory / name).open("xb"))
        file, data = self._files[rank], item.tensor_data
        assert data is not None
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        start = file.tell()
        save_tensor(box.of(tensor), file)
        self._storage[item.index] = _StorageInfo(name, start, file.tell() - start)

    def _finish_file(self, rank: int) -> FileEntry:
        file = self._files[rank]
        os.fsync(file.fileno())
        file.close()
        return file.entry()

    def finish(self) -> dict[str, FileEntry]:
        """Force everything to storage and write `.metadata`; returns the shards' entries.

        Raises:
            CheckpointError: a planned tensor was not written.
        """
        if self._items:
            raise CheckpointError(f"not written: {', '.join(sorted(self._items)[:5])}")
        done = {
            self._file_name(rank): self._lanes[self._lane_of[rank]].submit(self._finish_file, rank)
            for rank in self._files
        }
        files = {name: future.result() for name, future in sorted(done.items())}
        self._metadata.storage_data = self._storage
        self._metadata.storage_meta = StorageMeta()
        self._metadata.version = CURRENT_DCP_VERSION
        with (self._directory / METADATA_NAME).open("xb") as file:
            pickle.dump(self._metadata, file)
            file.flush()
            os.fsync(file.fileno())
        return files

    def close(self) -> None:
        """Stop the threads and close the files, after success or failure."""
        for lane in self._lanes:
            lane.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            with suppress(OSError):  # of a full disk again, and that has been told
                file.close()


def save_tensor(part: Tensor, file: ChecksumStream) -> None:
    """Append a tensor to a file in torch's form.

    Raises:
        OSError: from the file system.
    """
    try:
        torch.save(compact(part), cast(Any, file))
    except RuntimeError as error:
        # After a write that failed torch writes the end of its archive, and fails at that.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def compact(part: Tensor) -> Tensor:
    """Return a contiguous tensor whose storage is its own values: torch.save stores the storage."""
    part = part.contiguous()
    if part.untyped_storage().nbytes() == part.nbytes:
        return part
    if part.numel() == 0:
        return torch.empty(part.shape, dtype=part.dtype)
    return torch.from_numpy(buffer_of(part)).view(part.dtype).view(part.shape)
