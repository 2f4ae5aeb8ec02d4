"""Tensors of a checkpoint one at a time: read in one process, written as many ranks would.

No process group and no device are needed, and no more of the model is in memory than the largest
tensor and a buffer. Reading is DCP's own; the split of tensors over files is DCP's own planning of
what each rank of the target layout would save.
"""

import mmap
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from isal.isal_zlib import crc32
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megafp8.checkpoint.files import METADATA_NAME
from megafp8.checkpoint.find import read_record, verify_files
from megafp8.checkpoint.metadata import check_index
from megafp8.checkpoint.reader import CheckpointReader
from megafp8.checkpoint.record import CheckpointRecord, FileEntry, TensorEntry
from megafp8.checkpoint.tensor_file import buffer_of, view_tensor
from megafp8.checkpoint.writing import ChecksumStream
from megafp8.errors import CheckpointError

# Bytes of tensors that may be in memory at once; a larger tensor is alone there.
BUFFER_BYTES = 64 * 2**20
# Reading, checksums and writing release the interpreter's lock, so threads are enough.
WORKERS = max(2, min(8, os.cpu_count() or 2))


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


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the torch dtype of an entry.

    Raises:
        CheckpointError: torch has no dtype of that name.
    """
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype {entry.dtype!r} is not one of torch's")
    return dtype


def bytes_of(entry: TensorEntry) -> int:
    """Return the bytes of a tensor's values."""
    return torch.Size(entry.shape).numel() * dtype_of(entry).itemsize


def crc32_of_tensor(tensor: Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes in row-major order, eight hexadecimal digits."""
    return f"{crc32(buffer_of(tensor.contiguous())):08x}"


class TensorReader:
    """Reads the tensors of a complete checkpoint whole, whatever layout saved them. Thread-safe.

    Attributes:
        directory: the checkpoint.
        record: its `megafp8.json`.
    """

    def __init__(self, directory: Path, record: CheckpointRecord) -> None:
        """Open files that have been verified, or have just been written; see `open`."""
        self.directory, self.record = Path(directory), record
        self._reader = CheckpointReader(self.directory, record.files)
        self._metadata = self._reader.read_metadata()
        check_index(self.directory, record, self._metadata)

    @classmethod
    def open(cls, directory: Path, *, checksums: bool = True) -> "TensorReader":
        """Verify a checkpoint and open it.

        Args:
            directory: a complete checkpoint.
            checksums: read all files and compare their CRC-32, not sizes alone.

        Raises:
            CheckpointError: it is partial or damaged; the file is named.
        """
        directory = Path(directory).absolute()
        record = read_record(directory)
        verify_files(directory, record, checksums=False)
        if checksums:
            parts = max(1, min(WORKERS, len(record.files)))
            with ThreadPoolExecutor(parts) as pool:
                for done in [
                    pool.submit(verify_files, directory, record, part=(part, parts))
                    for part in range(parts)
                ]:
                    done.result()
        return cls(directory, record)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self.record.tensors)

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor's global shape and dtype."""
        return self.record.tensors[name]

    def file_of(self, name: str) -> Path:
        """Return a file that holds a tensor, or part of it: for messages."""
        places = self._metadata.storage_data or {}
        found = (place for index, place in places.items() if index.fqn == name)
        return self.directory / next(found).relative_path

    def read(self, name: str) -> Tensor:
        """Return a tensor whole, contiguous, on the CPU.

        Raises:
            CheckpointError: its parts cannot be read or are not what the record says.
        """
        try:
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            whole = len(stored.chunks) == 1
            return self._read_one_part(name, stored) if whole else self._read_parts(name)
        except CheckpointError:
            raise
        except Exception as error:  # torch.load and DCP raise many types on damaged bytes
            raise CheckpointError(
                f"{self.directory} is damaged: no tensor is stored where {METADATA_NAME} says for "
                f"{name} ({type(error).__name__})"
            ) from error

    def _read_one_part(self, name: str, stored: TensorStorageMetadata) -> Tensor:
        """Return a tensor that is stored in one part, without the copy of `_read_parts`."""
        entry, places = self.record.tensors[name], self._metadata.storage_data
        assert places is not None
        place = places[MetadataIndex(name, stored.chunks[0].offsets)]
        with (self.directory / place.relative_path).open("rb") as file:
            # Seen where the file is mapped: no memory to allocate and fill. Private, since torch
            # wants it writable.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            tensor = view_tensor(memoryview(mapped)[place.offset : place.offset + place.length])
            if tensor is None:
                part = self._reader._slice_file(file, place)
                tensor = torch.load(part, map_location="cpu", weights_only=True)
        if tensor.shape != entry.shape or tensor.dtype != dtype_of(entry):
            raise CheckpointError(
                f"{self.directory} is damaged: {name} is {tensor.dtype}{list(tensor.shape)}, its "
                f"record says {entry.dtype}{list(entry.shape)}"
            )
        return tensor.contiguous()

    def _read_parts(self, name: str) -> Tensor:
        entry = self.record.tensors[name]
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry))
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor


def in_order(
    items: Iterable[tuple[Any, int]],
    work: Callable[[Any], Any],
    budget: int = BUFFER_BYTES,
) -> Iterator[Any]:
    """Do `work` on items in threads and yield the results in the items' order.

    Args:
        items: (argument of `work`, bytes that its result holds).
        work: called in a thread.
        budget: bytes of results that may wait or be worked on; one larger item goes alone.
    """
    waiting: deque[tuple[Future[Any], int]] = deque()
    held = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for item, size in items:
                while waiting and (held + size > budget or len(waiting) >= 4 * WORKERS):
                    future, done = waiting.popleft()
                    yield future.result()
                    held -= done
                waiting.append((pool.submit(work, item), size))
                held += size
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for future, _ in waiting:
                future.cancel()


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
