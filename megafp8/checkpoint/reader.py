"""The one reader of DCP's shards: for training at any layout, for tools and for other programs'.

A shard holds one `torch.save` archive for each part of a tensor. `torch.load` on "meta" says where
in it the values lie, without reading them; they are then seen where the file is mapped, or read
once into the memory where they belong and summed on the way.
"""

import io
import mmap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _create_file_view, find_state_dict_object

from megafp8.checkpoint.files import CHUNK_BYTES, METADATA_NAME, crc32_of, read_ahead
from megafp8.checkpoint.find import read_record, verify_file, verify_files
from megafp8.checkpoint.metadata import check_index, read_metadata
from megafp8.checkpoint.record import CheckpointRecord, FileEntry, TensorEntry
from megafp8.checkpoint.tensors import WORKERS, buffer_of
from megafp8.errors import CheckpointError


class ShardReader:
    """Reads the tensors of any DCP checkpoint whole, one at a time. Thread-safe.

    Attributes:
        directory: The checkpoint.
        metadata: Its index, checked (`read_metadata`).
    """

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        self.directory, self.metadata = Path(directory), metadata
        self._places: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data or {}

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Return a tensor, contiguous, on the CPU; writing to it leaves the file as it is.

        Args:
            name: As stored.
            row: Only this index of the first dimension.

        Raises:
            CheckpointError: A file cannot be read, or holds something else than the index says.
        """
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), name
        if row is None and len(entry.chunks) == 1:
            return self._mapped(name, entry.chunks[0]).contiguous()
        size = entry.size if row is None else entry.size[1:]
        whole = torch.empty(size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            offsets = chunk.offsets
            if 0 in chunk.sizes:
                continue
            if row is not None and not offsets[0] <= row < offsets[0] + chunk.sizes[0]:
                continue
            part = self._mapped(name, chunk)
            if row is not None:
                part, offsets = part[row - offsets[0]], offsets[1:]
            narrow_tensor_by_index(whole, offsets, part.shape).copy_(part)
        return whole

    def read_object(self, place: _StorageInfo) -> Any:
        """Return a stored value that is no tensor, as torch's weights-only unpickler admits it."""
        with (self.directory / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            return torch.load(io.BytesIO(file.read(place.length)), "cpu", weights_only=True)

    def file_of(self, name: str) -> Path:
        """Return a file that holds a tensor, or part of it: for messages."""
        found = (place for index, place in self._places.items() if index.fqn == name)
        return self.directory / next(found).relative_path

    def _mapped(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        """Return a part of a tensor where its file is mapped: no memory to allocate and fill."""
        place = self._places[MetadataIndex(name, chunk.offsets)]
        path = self.directory / place.relative_path
        try:
            with path.open("rb") as file:
                return _view(map_file(file), *self._locate(file, name, chunk))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def _locate(self, file: Any, name: str, chunk: ChunkStorageMetadata) -> tuple[Tensor, int]:
        """Return a stored part, on "meta", and the byte of its file at which its storage begins."""
        place = self._places[MetadataIndex(name, chunk.offsets)]
        try:
            archive = _create_file_view(file, place.offset, place.length)
            stored = torch.load(archive, "meta", weights_only=True)
            storage = stored.untyped_storage()  # sparse tensors have none
            start = storage._checkpoint_offset
            if start + storage.nbytes() > place.length:
                raise ValueError("cut off")
        except OSError:
            raise
        except Exception as error:  # torch.load raises nearly any type, with advice of its own
            raise CheckpointError(
                f"{self.directory} is damaged: no tensor is stored where {METADATA_NAME} says for "
                f"{name} ({type(error).__name__})"
            ) from error
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        if (stored.shape, stored.dtype) != (chunk.sizes, entry.properties.dtype):
            raise CheckpointError(
                f"{self.directory} is damaged: {name} at {list(chunk.offsets)} is stored as "
                f"{stored.dtype}{list(stored.shape)}, its index says "
                f"{entry.properties.dtype}{list(chunk.sizes)}"
            )
        return stored, place.offset + start


class TensorReader(ShardReader):
    """Reads the tensors of a complete checkpoint, whatever layout saved them. Thread-safe.

    Attributes:
        record: Its `megafp8.json`.
    """

    def __init__(self, directory: Path, record: CheckpointRecord) -> None:
        """Open files that have been verified, or have just been written; see `open`."""
        sizes = {name: entry.size for name, entry in record.files.items()}
        super().__init__(directory, read_metadata(directory, sizes))
        self.record = record
        check_index(self.directory, record, self.metadata)

    @classmethod
    def open(cls, directory: Path, *, checksums: bool = True) -> "TensorReader":
        """Verify a checkpoint and open it.

        Args:
            directory: A complete checkpoint.
            checksums: Read all files and compare their CRC-32, not sizes alone.

        Raises:
            CheckpointError: It is partial or damaged; the file is named.
        """
        directory = Path(directory).absolute()
        record = read_record(directory)
        verify_files(directory, record, checksums=False)
        if checksums:
            with ThreadPoolExecutor(WORKERS) as pool:
                list(pool.map(lambda name: verify_file(directory, record, name), record.files))
        return cls(directory, record)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self.record.tensors)

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor's global shape and dtype."""
        return self.record.tensors[name]

    def files_of(self, items: Iterable[ReadItem]) -> set[str]:
        """Return the names of the files that items of a plan are in."""
        return {self._places[item.storage_index].relative_path for item in items}

    def fill(
        self, tensors: Mapping[str, Tensor], items: Sequence[ReadItem], verify: Iterable[str]
    ) -> None:
        """Fill tensors in place, each file read once, and compare checksums on the way.

        Args:
            tensors: Name to tensor or DTensor.
            items: What to read, of a plan that DCP made for `tensors`.
            verify: Files to compare with the record; those that no item is in, too.

        Raises:
            CheckpointError: A file is damaged; it is named. Some tensors are then filled, others
                are not.
        """
        verified, state = set(verify), dict(tensors)
        by_file: dict[str, list[ReadItem]] = {name: [] for name in sorted(verified)}
        for item in items:
            by_file.setdefault(self._places[item.storage_index].relative_path, []).append(item)
        for name, its_items in by_file.items():
            path = self.directory / name
            try:
                self._fill_from(path, state, its_items, name in verified)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be read: {error.strerror or error}"
                ) from error
            except Exception:  # damaged bytes raise nearly any type: what they are comes first
                _compare(path, crc32_of(path), self.record.files[name])
                raise

    def _fill_from(
        self, path: Path, state: dict[str, Tensor], items: Sequence[ReadItem], verify: bool
    ) -> None:
        strided: list[tuple[Tensor, Tensor]] = []
        with path.open("rb") as archives, path.open("rb", buffering=0) as file:
            content = _Content(file, verify)
            # A rank that held nothing of its own has left an empty file, which cannot be mapped.
            mapped = map_file(file) if items else memoryview(b"")
            # In the file's order: the disk reads on while a tensor is looked at and filled.
            for item in sorted(items, key=lambda one: self._places[one.storage_index].offset):
                index = item.storage_index
                chunk = self._chunk(index)
                stored, start = self._locate(archives, index.fqn, chunk)
                target = find_state_dict_object(state, item.dest_index).detach()
                target = narrow_tensor_by_index(target, item.dest_offsets, item.lengths)
                if item.lengths == chunk.sizes and stored.is_contiguous() and _is_one_run(target):
                    first = start + stored.storage_offset() * stored.itemsize
                    content.read_into(first, memoryview(buffer_of(target)))
                    continue
                source = _view(mapped, stored, start)
                source = narrow_tensor_by_index(source, item.storage_offsets, item.lengths)
                strided.append((target, source))
            if verify:
                _compare(path, content.finish(), self.record.files[path.name])
            for target, source in strided:
                target.copy_(source)

    def _chunk(self, index: MetadataIndex) -> ChunkStorageMetadata:
        """Return what the index says of the part that is stored at `index`."""
        tensor = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        if index.index is not None and tensor.chunks[index.index].offsets == index.offset:
            return tensor.chunks[index.index]
        return next(chunk for chunk in tensor.chunks if chunk.offsets == index.offset)


def map_file(file: Any) -> memoryview:
    """Map a file. Private, so that torch may have it writable; nothing is written to the file."""
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _view(mapped: memoryview, stored: Tensor, start: int) -> Tensor:
    """Return the values of `stored`, on "meta", as a view of a file whose `start` they follow."""
    if not stored.numel():
        return torch.empty(stored.shape, dtype=stored.dtype)
    count = stored.untyped_storage().nbytes() // stored.itemsize
    flat = torch.frombuffer(mapped, dtype=stored.dtype, count=count, offset=start)
    return flat.as_strided(stored.shape, stored.stride(), stored.storage_offset())


def _is_one_run(target: Tensor) -> bool:
    """Whether the values lie in host memory one after another."""
    return target.device.type == "cpu" and target.is_contiguous() and target.numel() > 0


class _Content:
    """The bytes of a file, each read once where that is possible, and the CRC-32 of all."""

    def __init__(self, file: Any, verify: bool) -> None:
        self._file, self._verify = file, verify
        self._position = self._checksum = 0
        self._scratch = memoryview(bytearray(CHUNK_BYTES if verify else 0))
        if verify:
            read_ahead(file)

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill memory with the bytes from `start`; summed if they follow those read before.

        Raises:
            CheckpointError: The file ends before.
        """
        if not self._verify or start < self._position:
            self._file.seek(start)
            self._fill(into)
            self._file.seek(self._position)
            return
        while self._position < start:
            self._sum(self._scratch[: start - self._position])
        self._sum(into)

    def finish(self) -> str:
        """Read the rest; returns the CRC-32 of the whole file."""
        while count := self._file.readinto(self._scratch):
            self._checksum = crc32(self._scratch[:count], self._checksum)
        return f"{self._checksum:08x}"

    def _sum(self, into: memoryview) -> None:
        for first in range(0, len(into), CHUNK_BYTES):
            part = into[first : first + CHUNK_BYTES]
            self._fill(part)
            self._checksum = crc32(part, self._checksum)  # from the processor's cache
        self._position += len(into)

    def _fill(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = self._file.readinto(into[done:])
            if not count:
                raise CheckpointError(f"{self._file.name} ends early: it was cut while it was read")
            done += count


def _compare(path: Path, found: str, entry: FileEntry) -> None:
    if found != entry.crc32:
        raise CheckpointError(f"{path} is damaged: crc32 {found}, expected {entry.crc32}")
