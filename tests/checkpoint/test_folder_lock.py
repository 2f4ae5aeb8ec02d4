"""One job a folder: a living owner keeps it, a dead one does not, on this host or another."""

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint.lock import LOCK_NAME, FolderLock, _host
from megafp8.errors import CheckpointError
from tests.support.limits import PATIENCE_S


def quick(folder: Path) -> FolderLock:
    return FolderLock(folder, beat=0.05, stale=0.6)


def owner(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LOCK_NAME).read_text())


def write_owner(folder: Path, **changes: Any) -> None:
    other = {"token": "f" * 16, "host": "elsewhere", "pid": 1, "since": "x"}
    (folder / LOCK_NAME).write_text(json.dumps({**other, **changes}))


def touched(folder: Path) -> int:
    return (folder / LOCK_NAME).stat().st_mtime_ns


def test_the_second_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    first = quick(tmp_path)
    first.acquire()
    assert owner(tmp_path)["pid"] == os.getpid()
    with pytest.raises(CheckpointError, match=f"in use by another job .process {os.getpid()} on"):
        quick(tmp_path).acquire()
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second = quick(tmp_path)
    second.acquire()
    second.release()


def test_the_owner_keeps_giving_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says of all of them since when it is there, which a second job is told."""
    clock = itertools.count()
    monkeypatch.setattr(time, "strftime", lambda form: f"moment {next(clock)}")
    lock = quick(tmp_path)
    lock.acquire()
    for _ in range(2):
        before = touched(tmp_path)
        until(lambda before=before: touched(tmp_path) > before)
    assert owner(tmp_path)["since"] == "moment 0"
    with pytest.raises(CheckpointError, match="since moment 0"):
        quick(tmp_path).acquire()
    lock.release()


def acquire_and_wait(folder: str, ready: Any) -> None:
    FolderLock(Path(folder)).acquire()
    ready.send(True)
    time.sleep(60.0)


def test_a_killed_owner_is_replaced_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=acquire_and_wait, args=(str(tmp_path), theirs))
    process.start()
    assert ours.recv()
    with pytest.raises(CheckpointError, match=f"process {process.pid} on"):
        quick(tmp_path).acquire()
    process.kill()
    process.join()
    began = time.monotonic()
    lock = FolderLock(tmp_path, stale=PATIENCE_S)
    lock.acquire()
    assert time.monotonic() - began < PATIENCE_S / 2, "it waited for signs of life"
    assert owner(tmp_path)["pid"] == os.getpid()
    lock.release()


def test_an_owner_on_another_host_is_judged_by_its_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner(tmp_path)
    began = time.monotonic()
    lock = quick(tmp_path)
    lock.acquire()  # none came
    assert time.monotonic() - began >= 0.6
    lock.release()

    write_owner(tmp_path)
    moved = threading.Timer(0.2, os.utime, (tmp_path / LOCK_NAME,))  # as its owner would
    moved.start()
    with pytest.raises(CheckpointError, match="process 1 on elsewhere, since x"):
        quick(tmp_path).acquire()
    moved.join()
    again = quick(tmp_path)
    again.acquire()  # the refused one holds nothing
    again.release()


def test_a_damaged_file_is_an_owner_that_gives_no_signs(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("{")
    lock = quick(tmp_path)
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life alone tell, on this host as well."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = quick(tmp_path)
    lock.acquire()
    with pytest.raises(CheckpointError, match=f"in use by another job .process {os.getpid()} on"):
        quick(tmp_path).acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    write_owner(tmp_path, host=_host())
    again = quick(tmp_path)
    again.acquire()
    again.release()


@pytest.mark.parametrize("dead", [False, True])
def test_one_of_many_that_start_at_once_gets_it(tmp_path: Path, dead: bool) -> None:
    """Eight jobs find no owner, or the same dead one, at the same moment; one wins, each time."""
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if dead:
            write_owner(folder, host=_host())
        barrier, won = threading.Barrier(8), []

        def start(folder: Path = folder, barrier: Any = barrier, won: Any = won) -> None:
            lock = quick(folder)
            barrier.wait()
            with contextlib.suppress(CheckpointError):
                lock.acquire()
                won.append(lock)

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        won[0].release()
        assert list(folder.iterdir()) == []


def test_a_folder_that_turned_read_only_keeps_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that ends there shall end with its own reason."""
    lock = quick(tmp_path)
    lock.acquire()

    def refuse(*args: Any, **keywords: Any) -> None:
        raise OSError(30, "Read-only file system")

    with caplog.at_level(logging.WARNING, logger="megafp8"), monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        lock.release()
    assert ".lock could not be removed: [Errno 30]" in caplog.text


def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **keywords: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refuse)
        with pytest.raises(OSError, match="No space left"):
            quick(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []
    again = quick(tmp_path)
    again.acquire()
    again.release()


def test_a_lock_that_was_taken_away_is_noticed(tmp_path: Path) -> None:
    """As from a host that stood still for longer than an owner is waited for."""
    lock = quick(tmp_path)
    lock.acquire()
    lock.check()
    write_owner(tmp_path, host="node7", pid=99)
    limit = time.monotonic() + PATIENCE_S
    while not lock.lost:
        assert time.monotonic() < limit
        time.sleep(0.02)
    with pytest.raises(CheckpointError, match="taken away from this job by process 99 on node7"):
        lock.check()
    lock.release()
    assert owner(tmp_path)["pid"] == 99, "it is the other job's now"


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_lock_that_cannot_be_read_for_a_while_is_still_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lock, reads = quick(tmp_path), []

    def refuse(*args: Any, **keywords: Any) -> str:
        reads.append(args)
        raise OSError(116, "Stale file handle")

    with caplog.at_level(logging.WARNING, logger="megafp8"), monkeypatch.context() as patch:
        lock.acquire()
        patch.setattr(Path, "open", refuse)
        until(lambda: len(reads) >= 3)
        lock.check()
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert "cannot be renewed: [Errno 116] Stale file handle" in line
    # Damage is none either: it may be another job's, half written.
    content = (tmp_path / LOCK_NAME).read_text()
    (tmp_path / LOCK_NAME).write_text(content[:20])
    time.sleep(0.2)
    lock.check()
    (tmp_path / LOCK_NAME).write_text(content)
    before = touched(tmp_path)
    until(lambda: touched(tmp_path) > before)
    (tmp_path / LOCK_NAME).write_text('{"pid": 7}')  # another program's
    until(lambda: bool(lock.lost))
    assert "by process 7 on None" in lock.lost
    lock.release()
