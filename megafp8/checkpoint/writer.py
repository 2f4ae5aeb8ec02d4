"""The one writer of DCP's shards: by each rank of a run, or by one process for all ranks.

DCP plans which rank writes which part and what its index says. Its own file writer would keep every
tensor of a file until the file is closed, and takes no checksums.
"""

import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from isal.isal_zlib import crc32
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
from megafp8.checkpoint.tensors import buffer_of, dtype_of
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
    entries: Mapping[str, TensorEntry], parts: Sequence[Iterable[tuple[str, Box | None]]]
) -> tuple[list[list[WriteItem]], Metadata]:
    """Return what each rank writes and DCP's index of it, without the places in the files.

    Tensors and parts that several ranks hold are written by one of them, as DCP chooses.

    Args:
        entries: all tensors.
        parts: for each rank, names and what it holds of each; None for all of it.

    Raises:
        CheckpointError: the parts of a tensor do not fill it.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    plans = [
        SavePlan([_write_item(name, entries[name], box) for name, box in held]) for held in parts
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


class ChecksumStream:
    """A file that is written from start to end; CRC-32 and size of what went through.

    Reading a file again only to sum it would cost as much as writing it into the page cache.

    Attributes:
        error: Why a write failed; None if none did.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.error: BaseException | None = None
        self._file = file
        self._crc32 = 0
        self._size = 0

    def write(self, content: Any) -> int:
        """Append bytes (anything with a buffer)."""
        try:
            view = memoryview(content)
            view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
            self._crc32 = crc32(view, self._crc32)
            self._file.write(view)
        except BaseException as error:  # Ctrl-C, too: whoever calls from C++ loses it
            self.error = error
            raise
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def fileno(self) -> int:
        """Descriptor for DCP's fsync, which must find nothing left in Python's buffer."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; the size and the sum stay."""
        self._file.close()

    def entry(self) -> FileEntry:
        """Size and checksum of what was written."""
        return FileEntry(size=self._size, crc32=f"{self._crc32:08x}")


class ShardFile:
    """A rank's file of tensors, one `torch.save` archive after another.

    Attributes:
        name: `__R_0.distcp`.
        places: where the parts are that were appended.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.name = f"__{rank}_0.distcp"
        self.places: dict[MetadataIndex, _StorageInfo] = {}
        self._stream = ChecksumStream((directory / self.name).open("xb"))

    def append(self, index: MetadataIndex, part: Tensor) -> None:
        """Write a part of a tensor, of any device.

        Raises:
            OSError: from the file system.
        """
        start = self._stream.tell()
        save_tensor(part, self._stream)
        self.places[index] = _StorageInfo(self.name, start, self._stream.tell() - start)

    def finish(self) -> FileEntry:
        """Force everything to storage; returns the file's size and checksum."""
        os.fsync(self._stream.fileno())
        self.close()
        return self._stream.entry()

    def close(self) -> None:
        """Close the file, after success or failure."""
        self._stream.close()


def save_tensor(part: Tensor, file: ChecksumStream) -> None:
    """Append a tensor to a file in torch's form.

    Raises:
        OSError: from the file system.
    """
    try:
        torch.save(compact(part.detach().cpu()), cast(Any, file))
    except RuntimeError:
        # torch's zip writer tells of a position; the file of a full disk or Ctrl-C.
        if file.error is None:
            raise
        raise file.error from None


def compact(part: Tensor) -> Tensor:
    """Return a contiguous tensor whose storage is its own values: torch.save stores the storage."""
    part = part.contiguous()
    if part.untyped_storage().nbytes() == part.nbytes:
        return part
    if part.numel() == 0:
        return torch.empty(part.shape, dtype=part.dtype)
    return torch.from_numpy(buffer_of(part)).view(part.dtype).view(part.shape)


def write_index(
    directory: Path, metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]
) -> FileEntry:
    """Write DCP's `.metadata`; returns its size and checksum."""
    metadata.storage_data = dict(places)
    metadata.storage_meta = StorageMeta()  # no path: this directory's name is a temporary one
    metadata.version = CURRENT_DCP_VERSION
    with (directory / METADATA_NAME).open("xb") as file:
        stream = ChecksumStream(file)
        stream.write(pickle.dumps(metadata))
        os.fsync(stream.fileno())
    return stream.entry()
