"""A folder of checkpoints belongs to one job at a time.

The lock is that of the operating system on a file, `.lock`, which ends with its process however
that ends. It may not reach other hosts (NFS without locks, some parallel file systems), so the file
also names its owner, who touches it again and again: an owner on another host counts as dead once
that has stood still for long.
"""

import errno
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megafp8.errors import CheckpointError
from megafp8.log import get_logger

_logger = get_logger(__name__)

LOCK_NAME = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of a file system that has none

Owner = dict[str, Any]


class FolderLock:
    """Holds `.lock` in a folder from `acquire` to `release`, or to the end of the process.

    Args:
        folder: What is locked; it must exist.
        beat: Seconds between two signs of life.
        stale: Seconds without one after which an owner on another host counts as dead.

    Attributes:
        lost: Who has taken the lock from this job, in words; empty while it is held. This host may
            have stood still for so long that another one thought it dead.
    """

    def __init__(self, folder: Path, beat: float = 5.0, stale: float = 30.0) -> None:
        assert 0 < beat < stale, (beat, stale)
        self.path = Path(folder).absolute() / LOCK_NAME
        self.beat = beat
        self.stale = stale
        self.lost = ""
        self._token = os.urandom(8).hex()
        self._file = FileLock(self.path, thread_local=False, fallback_to_soft=False)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock; waits up to `stale` seconds where the owner is on another host.

        Raises:
            CheckpointError: a living job has it; names the job.
            OSError: `.lock` cannot be opened or written.
        """
        reached = self._lock()
        try:
            owner, sign = self._look()
            if owner is not None:
                here = reached and owner.get("host") == _host()
                if not here and self._moves(owner, sign):
                    raise self._refusal(owner)
                _logger.warning(
                    "%s was left by %s, which is gone: taking it over", self.path, _named(owner)
                )
            self._sign()
        except BaseException:
            self._file.release()
            raise
        self._thread = threading.Thread(target=self._keep_alive, name="lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Find the folder still this job's.

        Raises:
            CheckpointError: it is not.
        """
        if self.lost:
            raise CheckpointError(self.lost)

    def release(self) -> None:
        """Give the lock back; a second call, or one without the lock, does nothing."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        self._thread = None
        try:
            owner, _ = self._look()
            if owner is not None and owner.get("token") == self._token:
                self.path.unlink(missing_ok=True)
        except OSError as error:  # whoever comes next finds its owner gone
            _logger.warning("%s could not be removed: %s", self.path, error)
        self._file.release()

    def _sign(self) -> None:
        """Name this job in the file, which stays the same one: it is locked."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        mine = {"token": self._token, "host": _host(), "pid": os.getpid(), "since": since}
        try:
            self.path.write_text(json.dumps(mine), encoding="utf-8")
        except OSError:  # a full disk: the empty file is in nobody's way
            self.path.unlink(missing_ok=True)
            raise

    def _lock(self) -> bool:
        """Lock the file; False where the file system has no locks.

        Raises:
            CheckpointError: another process has locked it.
        """
        limit = time.monotonic() + self.stale
        while True:
            try:
                self._file.acquire(timeout=0)
                return True
            except Timeout:
                owner, _ = self._look()
                # Empty between making and filling; none if it was given back just now.
                if owner or time.monotonic() > limit:
                    raise self._refusal(owner or {}) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return False
            time.sleep(self.beat / 50)

    def _refusal(self, owner: Owner) -> CheckpointError:
        return CheckpointError(
            f"{self.path.parent} is in use by another job ({_named(owner)}, since "
            f"{owner.get('since')}); give another --save, or end that job first"
        )

    def _look(self) -> tuple[Owner | None, tuple[int, str]]:
        """Return whom the file names and its sign of life.

        Returns:
            None without a file, or with an empty one; {} where it is damaged.

        Raises:
            OSError: it cannot be read, perhaps only now (a stale handle on NFS).
        """
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                # Of the open file: opening it has an NFS client ask the server.
                text, touched = file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None, (0, "")
        try:
            owner = json.loads(text) if text else None
        except ValueError:
            owner = {}
        return owner if owner is None or isinstance(owner, dict) else {}, (touched, text)

    def _moves(self, owner: Owner, sign: tuple[int, str]) -> bool:
        """Tell whether an owner gives a sign of life within `stale` seconds."""
        message = "%s is held by %s: waiting up to %g s for a sign of life"
        _logger.info(message, self.path, _named(owner), self.stale)
        limit = time.monotonic() + self.stale
        while time.monotonic() < limit:
            time.sleep(self.beat / 5)
            now, moved = self._look()
            if now is None:
                return False  # given back
            if moved != sign:
                return True
        return False

    def _keep_alive(self) -> None:
        failing = False
        while not self._stop.wait(self.beat):
            trouble = self._renew()
            if self.lost:
                _logger.error("%s: nothing is saved to %s any more", self.lost, self.path.parent)
                return
            if trouble and not failing:
                _logger.warning("%s cannot be renewed: %s", self.path, trouble)
            failing = bool(trouble)

    def _renew(self) -> str:
        """Give a sign of life, or set `lost`; return what was in the way, if anything was."""
        try:
            owner, _ = self._look()
            if owner is not None and owner.get("token") == self._token:
                os.utime(self.path)
                return ""
            if owner == {} or (owner is None and self.path.exists()):
                return "its content is damaged"  # as where another job is just writing it
        except OSError as error:  # no sign that it is another's
            return str(error)
        self.lost = f"{self.path} was taken away from this job by {_named(owner or {})}, or removed"
        return ""


def _named(owner: Owner) -> str:
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _host() -> str:
    """Name this host, and the namespace in which its process ids mean something."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space}".strip()
