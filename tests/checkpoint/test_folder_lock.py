"""One job a folder: a living owner keeps it, a dead one does not, on this host or another."""

import contextlib
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

from megafp8.checkpoint.lock import LOCK_NAME, FolderLock, _host, _start_time
from megafp8.errors import CheckpointError
from tests.support.limits import PATIENCE_S


def quick(folder: Path) -> FolderLock:
    return FolderLock(folder, beat=0.05, stale=0.6)


def owner(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LOCK_NAME).read_text())


def write_owner(folder: Path, **changes: Any) -> None:
    mine = {"token": "f" * 16, "host": "elsewhere", "pid": 1, "started": "5", "since": "x"}
    (folder / LOCK_NAME).write_text(json.dumps({**mine, "beat": 0, **changes}))


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
    limit = time.monotonic() + PATIENCE_S
    while owner(tmp_path)["beat"] < 2:
        assert time.monotonic() < limit
        time.sleep(0.02)
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


def test_a_process_id_that_was_given_away_again_is_not_the_owner(tmp_path: Path) -> None:
    lock = quick(tmp_path)
    lock.acquire()
    content = owner(tmp_path)
    lock.release()
    assert content["started"] == _start_time(os.getpid())
    write_owner(tmp_path, **{**content, "started": "1"})
    again = quick(tmp_path)
    again.acquire()
    again.release()


def test_an_owner_on_another_host_is_judged_by_its_signs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner(tmp_path)
    began = time.monotonic()
    lock = quick(tmp_path)
    lock.acquire()  # none came
    assert time.monotonic() - began >= 0.6
    lock.release()

    changes = []
    touch = Path.touch

    def noted(path: Path, *arguments: Any) -> None:
        changes.append(path.parent)
        touch(path, *arguments)

    monkeypatch.setattr(Path, "touch", noted)
    write_owner(tmp_path)
    quick(tmp_path).acquire()
    assert len(changes) >= 5 and set(changes) == {tmp_path}, "a cached folder would never change"

    class Alive(FolderLock):
        reads = 0

        def _read(self) -> dict[str, Any] | None:
            self.reads += 1
            write_owner(tmp_path, beat=self.reads // 2)  # as its owner would, now and then
            return super()._read()

    write_owner(tmp_path)
    with pytest.raises(CheckpointError, match="process 1 on elsewhere, since x"):
        Alive(tmp_path, beat=0.05, stale=0.6).acquire()


def test_a_damaged_file_is_an_owner_that_gives_no_signs(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("{")
    lock = quick(tmp_path)
    lock.acquire()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_quicker_jobs_lock_is_given_back(tmp_path: Path) -> None:
    """Two jobs find the same dead owner; the slower one must not remove the quicker one's file."""
    write_owner(tmp_path)
    dead = owner(tmp_path)
    quicker, slower = quick(tmp_path), quick(tmp_path)
    quicker._remove_stale(dead)
    assert quicker._create()
    slower._remove_stale(dead)
    slower._move_aside(dead)  # as if their hosts' advisory locks did not meet
    assert owner(tmp_path)["token"] == quicker._token
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    lock = quick(tmp_path)
    lock.acquire()
    with pytest.raises(CheckpointError, match="in use by another job"):
        quick(tmp_path).acquire()
    lock.release()


@pytest.mark.parametrize("dead", [False, True])
def test_one_of_many_that_start_at_once_gets_it(tmp_path: Path, dead: bool) -> None:
    """Eight jobs find no owner, or the same dead one, at the same moment; one wins, each time."""
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if dead:
            write_owner(folder, host=_host(), pid=2**22 + 5)
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
        patch.setattr(Path, "read_text", refuse)
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
    beat = owner(tmp_path)["beat"]
    until(lambda: owner(tmp_path)["beat"] > beat)
    (tmp_path / LOCK_NAME).write_text('{"pid": 7}')  # another program's
    until(lambda: bool(lock.lost))
    assert "by process 7 on None" in lock.lost
    lock.release()


def test_a_lock_that_cannot_be_read_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_owner(tmp_path, host=_host(), pid=2**22 + 5)
    read, reads = Path.read_text, []

    def refuse(path: Path, *args: Any, **keywords: Any) -> str:
        reads.append(path)
        if path.name == LOCK_NAME and (len(reads) < 3 or forever):
            raise PermissionError(13, "Permission denied")
        return read(path, *args, **keywords)

    monkeypatch.setattr(Path, "read_text", refuse)
    forever = True
    with pytest.raises(CheckpointError, match=".lock cannot be read, so another job may be there"):
        quick(tmp_path).acquire()
    reads.clear()
    forever = False
    lock = quick(tmp_path)
    lock.acquire()  # it could be read again, and its owner is dead
    lock.release()


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_no_file_is_not_taken(tmp_path: Path, kind: str) -> None:
    """Opening a pipe would wait for ever."""
    path = tmp_path / ".lock"
    make = {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "loop": lambda: path.symlink_to(path),
    }
    make[kind]()
    with pytest.raises(CheckpointError, match=r"\.lock cannot be read.*give another --save"):
        FolderLock(tmp_path, beat=0.05, stale=0.2).acquire()
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", ["link to nowhere", "deep"])
def test_other_damage_is_taken_over(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".lock"
    if kind == "deep":
        path.write_text("[" * 200_000)
    else:
        path.symlink_to("nowhere")
    lock = FolderLock(tmp_path, beat=0.05, stale=0.2)
    lock.acquire()
    assert not path.is_symlink() and json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [{}, {"started": None}])
def test_a_dead_owner_without_a_start_time_is_dead(tmp_path: Path, more: dict[str, None]) -> None:
    owner = {"host": _host(), "pid": 2**22 + 1, **more}  # beyond Linux's largest
    (tmp_path / ".lock").write_text(json.dumps(owner))
    lock = FolderLock(tmp_path, beat=1.0, stale=60.0)
    lock.acquire()
    lock.release()
