"""DCP's reader of shards, with checksums taken while the bytes go where they belong.

A verified load reads each file once: to read it for its checksum and then again for its tensors
would take half as long again.
"""

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megafp8.checkpoint.files import CHUNK_BYTES, METADATA_NAME, crc32_of, read_ahead
from megafp8.checkpoint.metadata import read_metadata
from megafp8.checkpoint.record import FileEntry
from megafp8.checkpoint.tensor_file import StoredTensor, buffer_of, locate_tensor
from megafp8.errors import CheckpointError


class CheckpointReader(FileSystemReader):
    """DCP's reader of files with the restricted unpickler in front of `.metadata`."""

    def __init__(self, directory: Path, files: Mapping[str, FileEntry]) -> None:
        """Prepare to read a checkpoint.

        Args:
            directory: The checkpoint.
            files: The files that may be read, from `megafp8.json`.
        """
        super().__init__(directory)
        self.directory = Path(directory)
        self.files = files
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's index; the file is read once.

        Args:
            *args: Not used; DCP's signature.
            **kwargs: Not used; DCP asks for a rank's own index where no global one is found.

        Raises:
            CheckpointError: the file is missing, damaged, names anything but DCP's metadata, or
                describes data that are not there.
        """
        if self._metadata is None:
            sizes = {name: entry.size for name, entry in self.files.items()}
            self._metadata = read_metadata(self.directory, sizes)
            assert self._metadata.storage_meta is not None
            self._metadata.storage_meta.load_id = self.load_id
            self.set_up_storage_reader(self._metadata, is_coordinator=True)
        return self._metadata

    def files_of(self, plan: LoadPlan) -> set[str]:
        """Return the names of the files that a plan reads."""
        return {self.storage_data[item.storage_index].relative_path for item in plan.items}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan; checksums are not looked at."""
        self.read_verified(plan, planner, ())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_verified(self, plan: LoadPlan, planner: LoadPlanner, names: Iterable[str]) -> None:
        """Fill the tensors of a plan, and compare the checksums of files on the way.

        Args:
            plan: What to read.
            planner: DCP's, which knows the tensors.
            names: Files to compare with the record; those that the plan does not read too.

        Raises:
            CheckpointError: a file is damaged; it is named. Some tensors are then filled, others
                are not.
        """
        verified = set(names)
        by_file: dict[str, list[ReadItem]] = {name: [] for name in sorted(verified)}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                self._read_file(name, items, planner, name in verified)
            except OSError as error:
                raise CheckpointError(
                    f"{self.directory / name} cannot be read: {error.strerror or error}"
                ) from error
            except Exception:  # damaged bytes raise nearly any type: what they are comes first
                self._raise_if_damaged(name)
                raise

    def _read_file(
        self, name: str, items: list[ReadItem], planner: LoadPlanner, verify: bool
    ) -> None:
        strided: list[tuple[Tensor, Tensor]] = []
        unknown: list[ReadItem] = []
        with (self.directory / name).open("rb", buffering=0) as file:
            content = _Content(file, verify)
            # Private, so that torch may have it writable; nothing is written to it. What it shows
            # of damaged bytes is not used: `locate_tensor` checks all that it returns.
            # A rank that held nothing of its own has left an empty file, which cannot be mapped.
            mapped = memoryview(b"")
            if items:
                mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
            # In the file's order: the disk reads on while a tensor is looked at and filled.
            for item in sorted(items, key=lambda one: self.storage_data[one.storage_index].offset):
                place = self.storage_data[item.storage_index]
                archive = mapped[place.offset : place.offset + place.length]
                stored = None
                if item.type != LoadItemType.BYTE_IO:
                    stored = locate_tensor(archive)
                if stored is None:
                    unknown.append(item)
                    continue
                target = self._target(item, stored, planner)
                into, first = _whole(item, stored, target), stored.first_byte
                if into is not None and first is not None:
                    content.read_into(place.offset + first, into)
                    continue
                source = stored.view(archive)
                source = narrow_tensor_by_index(source, item.storage_offsets, item.lengths)
                strided.append((target, source))
            # Damage is looked for before `unknown` bytes are given to torch.load.
            if verify:
                _compare(self.directory / name, content.finish(), self.files[name])
            for target, source in strided:
                target.copy_(source)
        if unknown:
            self._read_with_torch(unknown, planner)

    def _target(self, item: ReadItem, stored: StoredTensor, planner: LoadPlanner) -> Tensor:
        index = item.storage_index
        chunk = self._chunk(index)
        target = planner.resolve_tensor(item).detach()
        if stored.size != chunk.sizes or stored.dtype != target.dtype:
            raise CheckpointError(
                f"{self.directory} is damaged: {index.fqn} at {list(chunk.offsets)} is stored as "
                f"{stored.dtype}{list(stored.size)}, its index says "
                f"{target.dtype}{list(chunk.sizes)}"
            )
        return target

    def _read_with_torch(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        try:
            super().read_data(LoadPlan(items), planner)
        except Exception as error:  # torch.load raises nearly any type, with advice of its own
            names = ", ".join(sorted({item.storage_index.fqn for item in items})[:5])
            raise CheckpointError(
                f"{self.directory} is damaged: no tensor is stored where {METADATA_NAME} says "
                f"for {names} ({type(error).__name__})"
            ) from error

    def _raise_if_damaged(self, name: str) -> None:
        """Say that a file's bytes are wrong rather than what was made of them."""
        path = self.directory / name
        _compare(path, crc32_of(path), self.files[name])

    def _chunk(self, index: MetadataIndex) -> ChunkStorageMetadata:
        """Return what the index says of the part that is stored at `index`."""
        tensor = self.read_metadata().state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        if index.index is not None and tensor.chunks[index.index].offsets == index.offset:
            return tensor.chunks[index.index]
        return next(chunk for chunk in tensor.chunks if chunk.offsets == index.offset)


def _whole(item: ReadItem, stored: StoredTensor, target: Tensor) -> memoryview | None:
    """Return the target's memory, if a part is wanted whole and the memory is one run of bytes."""
    if item.lengths != torch.Size(stored.size):
        return None
    if target.device.type != "cpu" or not target.is_contiguous() or not target.numel():
        return None
    return memoryview(buffer_of(target))


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
            CheckpointError: the file ends before.
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
