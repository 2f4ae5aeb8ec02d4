"""A complete checkpoint written by one process, tensor by tensor, and read again at the end.

No process group and no device are needed, and no more of the model is in memory than the largest
tensor and a buffer.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from megafp8.checkpoint.files import (
    LATEST_NAME,
    METADATA_NAME,
    is_temporary,
    iteration_name,
    remove_directory,
    write_atomically,
)
from megafp8.checkpoint.lock import FolderLock
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.record import CheckpointRecord, FileEntry
from megafp8.checkpoint.save import commit, make_temporary
from megafp8.checkpoint.tensors import (
    BUFFER_BYTES,
    WORKERS,
    bytes_of,
    crc32_of_tensor,
    entry_of,
    in_order,
)
from megafp8.checkpoint.writer import Box, Holding, ShardFile, plan_shards, write_index
from megafp8.errors import CheckpointError


def write_streaming(
    root: Path,
    record: CheckpointRecord,
    holdings: Sequence[Holding],
    read: Callable[[str], Tensor],
) -> tuple[Path, dict[str, str]]:
    """Write `root/iter_N` and `root/latest` as the ranks of a layout would have saved them.

    Args:
        root: folder of checkpoints; made if it is missing.
        record: complete but for `files`; its `tensors` say what is written.
        holdings: for each rank what it saves, as of `plan_holdings`.
        read: returns a tensor whole; called once for each name, in threads. What a few calls
            return is in memory together, `BUFFER_BYTES` or one tensor.

    Returns:
        The checkpoint, and the CRC-32 of each tensor's global view as read back from the files.

    Raises:
        CheckpointError: it is there already, another job writes into the folder, a file cannot be
            written, or what was read back is not what `read` returned. Nothing that looks like a
            checkpoint is left behind.
    """
    root = Path(root).absolute()
    final = root / iteration_name(record.iteration)
    if final.exists():
        raise CheckpointError(f"--save: {final} is there already; give another folder")
    record = dataclasses.replace(record, tensors=dict(sorted(record.tensors.items())))
    try:
        with made_folders(root):
            lock = FolderLock(root)
            lock.acquire()
            try:
                for path in root.iterdir():
                    if is_temporary(path.name):  # of a job that was killed: nobody else writes here
                        remove_directory(path)
                return final, _write(root, final, record, holdings, read)
            finally:
                lock.release()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{final} could not be written: {reason}; nothing is left") from error


@contextmanager
def made_folders(folder: Path) -> Generator[None, None, None]:
    """Make a folder and its parents; those that are empty at the end are taken away again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _write(
    root: Path,
    final: Path,
    record: CheckpointRecord,
    holdings: Sequence[Holding],
    read: Callable[[str], Tensor],
) -> dict[str, str]:
    temporary = make_temporary(root, final.name)
    try:
        wanted, files = _fill(temporary, record, holdings, read)
        record = dataclasses.replace(record, files=dict(sorted(files.items())))
        found = _read_back(TensorReader(temporary, record))
        lost = [name for name, crc in wanted.items() if found[name] != crc]
        if lost:
            raise CheckpointError(
                f"{len(lost)} tensors were not conserved: "
                + ", ".join(f"{name} (crc32 {wanted[name]} -> {found[name]})" for name in lost[:20])
            )
        with _undone_unless_complete(root, final):
            commit(temporary, final, record)
    finally:
        if temporary.exists():
            remove_directory(temporary)
    return found


@contextmanager
def _undone_unless_complete(root: Path, final: Path) -> Generator[None, None, None]:
    """Take a checkpoint away again whose commit ends after the rename and before its end."""
    latest = root / LATEST_NAME
    former = latest.read_bytes() if latest.is_file() else None
    try:
        yield
    except BaseException:  # a signal's, too
        if final.exists():
            remove_directory(final)
        if latest.is_file() and latest.read_bytes() != former:
            latest.unlink()  # it names what is gone; without it the newest one counts
            if former is not None:
                write_atomically(latest, former.decode(errors="replace"))
        raise


def _fill(
    folder: Path,
    record: CheckpointRecord,
    holdings: Sequence[Holding],
    read: Callable[[str], Tensor],
) -> tuple[dict[str, str], dict[str, FileEntry]]:
    """Write all files; returns each tensor's CRC-32 before it was cut, and the files."""
    plans, metadata = plan_shards(record.tensors, [holding.items() for holding in holdings])
    items: dict[str, list[tuple[int, WriteItem]]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan:
            items[item.index.fqn].append((rank, item))
    files = _Files(folder, [rank for rank, plan in enumerate(plans) if plan])
    sums: dict[str, str] = {}
    writing: deque[tuple[int, list[Future[None]]]] = deque()
    held = 0

    def prepare(name: str) -> tuple[str, Tensor, str]:
        tensor = read(name)
        if entry_of(tensor) != record.tensors[name]:
            raise CheckpointError(
                f"{name} is {entry_of(tensor)}, planned was {record.tensors[name]}"
            )
        return name, tensor, crc32_of_tensor(tensor)

    try:
        sizes = [(name, bytes_of(entry)) for name, entry in record.tensors.items()]
        for name, tensor, sums[name] in in_order(sizes, prepare, BUFFER_BYTES // 2):
            while writing and held + tensor.nbytes > BUFFER_BYTES // 2:
                size, done = writing.popleft()
                for future in done:
                    future.result()
                held -= size
            parts = [files.append(rank, item, tensor) for rank, item in items[name]]
            writing.append((tensor.nbytes, parts))
            held += tensor.nbytes
        for _, done in writing:
            for future in done:
                future.result()
        return sums, files.finish(folder, metadata)
    finally:
        files.close()


class _Files:
    """The ranks' files. Each has one thread, which appends in order: equal calls, equal files."""

    def __init__(self, folder: Path, ranks: Sequence[int]) -> None:
        self._files = {rank: ShardFile(folder, rank) for rank in ranks}
        self._threads = [ThreadPoolExecutor(1) for _ in range(min(WORKERS, len(ranks)))]
        count = len(self._threads)
        self._thread_of = {rank: self._threads[i % count] for i, rank in enumerate(ranks)}

    def append(self, rank: int, item: WriteItem, tensor: Tensor) -> Future[None]:
        """Write a rank's part of a whole tensor, which must stay as it is until that is done."""
        assert item.tensor_data is not None
        chunk = item.tensor_data.chunk
        part = Box(tuple(chunk.offsets), tuple(chunk.sizes)).of(tensor)
        return self._thread_of[rank].submit(self._files[rank].append, item.index, part)

    def finish(self, folder: Path, metadata: Metadata) -> dict[str, FileEntry]:
        """Force everything to storage and write the index; returns the entries of all files."""
        done = {
            file.name: self._thread_of[rank].submit(file.finish)
            for rank, file in self._files.items()
        }
        entries = {name: future.result() for name, future in done.items()}
        places = {index: p for file in self._files.values() for index, p in file.places.items()}
        return {**entries, METADATA_NAME: write_index(folder, metadata, places)}

    def close(self) -> None:
        """Stop the threads and close the files, after success or failure."""
        for thread in self._threads:
            thread.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            with suppress(OSError):  # of a full disk again, and that has been told
                file.close()


def _read_back(reader: TensorReader) -> dict[str, str]:
    def check(name: str) -> tuple[str, str]:
        return name, crc32_of_tensor(reader.read(name))

    return dict(in_order(((name, bytes_of(reader.entry(name))) for name in reader.names), check))
