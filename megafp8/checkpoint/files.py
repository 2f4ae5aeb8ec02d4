"""Names inside a checkpoint folder, checksums, and writes that survive a power cut.

A folder holds `iter_0000010/` (complete once `megafp8.json` is inside), `latest`, and for short
times `tmp_iter_0000010.<token>/` (being written, or thrown away) and `old_iter_0000010.<token>/`
(the former content of an iteration that is saved again).
"""

import fcntl
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from isal.isal_zlib import crc32

RECORD_NAME = "megafp8.json"
METADATA_NAME = ".metadata"
LATEST_NAME = "latest"

# Exactly what `iteration_name` gives: a second spelling of a number would name the same iteration.
_NUMBER = r"([0-9]{7}|[1-9][0-9]{7,18})"
_ITERATION = re.compile(f"iter_{_NUMBER}")
_TEMPORARY = re.compile(f"tmp_iter_{_NUMBER}\\.[0-9a-f]{{8}}")
_UNFINISHED_LATEST = re.compile(f"{LATEST_NAME}\\.[0-9a-f]{{8}}\\.tmp")
_REPLACED = re.compile(f"old_iter_{_NUMBER}\\.[0-9a-f]{{8}}")

CHUNK_BYTES = 2**20  # small enough to be summed from the processor's cache


def iteration_name(iteration: int) -> str:
    """Return the directory name of an iteration, `iter_0000010` for 10."""
    assert iteration >= 0, iteration
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """Return the iteration that a directory name stands for, None for any other name."""
    match = _ITERATION.fullmatch(name)
    return int(match.group(1)) if match else None


def is_temporary(name: str) -> bool:
    """Tell whether a name is that of a directory which a save has not finished."""
    return _TEMPORARY.fullmatch(name) is not None


def is_unfinished_latest(name: str) -> bool:
    """Tell whether a name is that which `latest` has while `write_atomically` writes it."""
    return _UNFINISHED_LATEST.fullmatch(name) is not None


def replaced_iteration(name: str) -> int | None:
    """Return the iteration whose former content a directory holds, None for any other name."""
    match = _REPLACED.fullmatch(name)
    return int(match.group(1)) if match else None


def is_complete(directory: Path) -> bool:
    """Tell whether a checkpoint's record, its last file, is there."""
    return (directory / RECORD_NAME).is_file()


@contextmanager
def reading(directory: Path) -> Generator[bool, None, None]:
    """Keep a checkpoint from being deleted by a run's `--keep-last` while it is read.

    A shared lock on the record: it ends with the process however that ends. A file system without
    locks leaves the checkpoint as unprotected as it was; a missing record is the caller's affair.

    Yields:
        False if a process is just deleting it.
    """
    with _locked(directory, os.O_RDONLY, fcntl.LOCK_SH) as held:
        yield held


@contextmanager
def unread(directory: Path) -> Generator[bool, None, None]:
    """Keep a checkpoint that nobody reads from being read, in order to delete it.

    Yields:
        False if a process is inside `reading` for it.
    """
    # NFS makes `flock` from locks of byte ranges, where an exclusive one needs a writable file.
    # A read-only one cannot be asked; nor, most likely, deleted.
    with _locked(directory, os.O_RDWR, fcntl.LOCK_EX) as held:
        yield held


def is_being_read(directory: Path) -> bool:
    """Tell whether a process is inside `reading` for a checkpoint."""
    with unread(directory) as free:
        return not free


@contextmanager
def _locked(directory: Path, mode: int, kind: int) -> Generator[bool, None, None]:
    """Lock a checkpoint's record if that can be; False where another process's lock forbids it."""
    try:
        descriptor = os.open(directory / RECORD_NAME, mode)
    except OSError:
        yield True
        return
    held = True
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            held = False
        except OSError:
            pass  # no locks on this file system
        yield held
    finally:
        os.close(descriptor)


def read_ahead(file: IO[bytes]) -> None:
    """Have the disk read a whole file while its first parts are worked on."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def crc32_of(path: Path) -> str:
    """Return the CRC-32 (zlib) of a file's bytes as eight hexadecimal digits."""
    checksum = 0
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        read_ahead(file)
        while count := file.readinto(chunk):
            checksum = crc32(chunk[:count], checksum)
    return f"{checksum:08x}"


def sync_directory(directory: Path) -> None:
    """Force a directory's entries (new files, renames) to permanent storage."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old content or the new, never a part.

    Raises:
        OSError: the text could not be written; the old content is still there.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def remove_directory(directory: Path) -> None:
    """Delete a checkpoint directory without ever showing half of it under its own name.

    Of a link to a directory, and of a file that bears such a name, only itself is deleted.

    Deletion takes seconds for large shards. A kill in the middle would leave `iter_*` with a
    record and without its shards, which looks complete; the rename makes it a temporary first.
    """
    if directory.is_symlink() or not directory.is_dir():
        directory.unlink()
        return
    shutil.rmtree(directory if is_temporary(directory.name) else set_aside(directory))


def set_aside(directory: Path) -> Path:
    """Give a checkpoint directory the name of a temporary one, which no reader takes for whole."""
    iteration = replaced_iteration(directory.name)
    if iteration is None:
        iteration = iteration_of(directory.name)
    assert iteration is not None, f"{directory} is no checkpoint"
    doomed = directory.with_name(f"tmp_{iteration_name(iteration)}.{os.urandom(4).hex()}")
    os.rename(directory, doomed)
    return doomed
