"""DCP's file writer with checksums taken on the way, and its planner for state that was staged."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from isal.isal_zlib import crc32
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from megafp8.checkpoint.record import FileEntry


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


class _ChecksummedFiles(FileSystem):
    """DCP's file system; notes an entry for every file that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[Any, None, None]:
        """Open a file for DCP."""
        assert mode == "wb", mode
        with Path(path).open("wb") as file:
            stream = ChecksumStream(file)
            try:
                yield stream
            except RuntimeError as error:
                # torch's zip writer tells of a position; this one of a full disk or Ctrl-C.
                if stream.error is None:
                    raise
                raise stream.error from error
        self.entries[Path(path).name] = stream.entry()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Rename a file; its entry follows."""
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class ShardWriter(FileSystemWriter):
    """DCP's writer of one file per rank, summed while written and synced to storage.

    Attributes:
        entries: Name to size and checksum of the files that this rank wrote.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True, overwrite=False)
        files = _ChecksummedFiles()
        self.fs = files
        self.entries: Mapping[str, FileEntry] = files.entries

    def storage_meta(self) -> StorageMeta:
        """Return no path: DCP would pickle the temporary directory's into `.metadata`."""
        return StorageMeta()


class StagedPlanner(DefaultSavePlanner):
    """DCP's planner of a state whose local plan and tensors were taken at an earlier moment."""

    def __init__(self, plan: SavePlan, data: Mapping[MetadataIndex, Tensor]) -> None:
        # Names are flat already; without flattening DCP stores no second copy of them.
        super().__init__(flatten_state_dict=False)
        self.staged_plan = plan
        self.data = data

    def create_local_plan(self) -> SavePlan:
        """Return the plan that was made with the data."""
        self.plan = self.staged_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the tensor of an item, as it was staged."""
        return cast(Tensor, self.data[write_item.index])
