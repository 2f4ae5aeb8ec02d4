"""A folder of checkpoints belongs to one job at a time.

The lock is a file made exclusively, since advisory locks do not reach other hosts on every shared
file system. It names its owner. An owner that was killed leaves it behind, so whoever finds it asks
whether the owner lives: on the owner's own host by process id and start time, from elsewhere by a
counter in the file that the owner raises, read again until it has moved or stood still for long.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megafp8.errors import CheckpointError
from megafp8.log import get_logger

_logger = get_logger(__name__)

LOCK_NAME = ".lock"


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
        self._token = os.urandom(8).hex()
        self.lost = ""
        self._since = ""
        self._count = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock; waits up to `stale` seconds where the owner is on another host.

        Raises:
            CheckpointError: a living job has it; names the job. Or whose it is cannot be read.
        """
        self._since = time.strftime("%Y-%m-%d %H:%M:%S")
        while not self._create():
            owner = self._read_patiently()
            if owner is None:
                continue  # released in between
            alive = self._owner_lives(owner)
            if alive:
                raise CheckpointError(
                    f"{self.path.parent} is in use by another job (process {owner.get('pid')} on "
                    f"{owner.get('host')}, since {owner.get('since')}); give another --save, or "
                    f"end that job first"
                )
            _logger.warning(
                "%s was left by process %s on %s, which is gone: taking it over",
                self.path,
                owner.get("pid"),
                owner.get("host"),
            )
            self._remove_stale(owner)
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
            owner = self._read()
            if owner is not None and owner.get("token") == self._token:
                self.path.unlink(missing_ok=True)
        except OSError as error:  # whoever comes next finds its owner gone
            _logger.warning("%s could not be removed: %s", self.path, error)

    def _content(self) -> str:
        return json.dumps(
            {
                "token": self._token,
                "host": _host(),
                "pid": os.getpid(),
                "started": _start_time(os.getpid()),
                "since": self._since,
                "beat": self._count,
            }
        )

    def _create(self) -> bool:
        """Make the file with its content in one step, so that no reader finds it empty."""
        draft = self.path.with_name(f"{LOCK_NAME}.{self._token}.tmp")
        try:
            draft.write_text(self._content(), encoding="utf-8")
            try:
                os.link(draft, self.path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                    raise
                return self._create_without_links()
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _create_without_links(self) -> bool:
        """As `_create` where the file system has no hard links."""
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        return True

    def _read(self) -> dict[str, Any] | None:
        """Return the owner, None if there is no lock; a damaged file is an owner without a name.

        Raises:
            OSError: it cannot be read, perhaps only now (a stale handle on NFS, too many files).
        """
        return _owner_in(self.path)

    def _read_patiently(self) -> dict[str, Any] | None:
        """As `_read`; what cannot be read for long is no sign that its owner is gone."""
        limit = time.monotonic() + self.stale
        while True:
            try:
                return self._read()
            except OSError as error:
                if time.monotonic() >= limit:
                    raise CheckpointError(
                        f"{self.path} cannot be read, so another job may be there: {error}; give "
                        "another --save, or remove that file if no job writes there"
                    ) from error
                time.sleep(self.beat / 5)

    def _owner_lives(self, owner: dict[str, Any]) -> bool:
        if owner.get("host") == _host() and isinstance(owner.get("pid"), int):
            started = _start_time(owner["pid"])
            return started is not None and started == owner.get("started")
        _logger.info(
            "%s is held by process %s on %s: waiting up to %g s for a sign of life",
            self.path,
            owner.get("pid"),
            owner.get("host"),
            self.stale,
        )
        limit = time.monotonic() + self.stale
        while time.monotonic() < limit:
            time.sleep(min(self.beat, self.stale) / 5)
            self._look_anew()
            now = self._read_patiently()
            if now is None:
                return False
            if now != owner:
                return True
        return False

    def _look_anew(self) -> None:
        """Change the folder, so that this host asks the server for what others changed in it.

        An NFS client may answer from its memory for up to a minute, with the file of a living
        owner as it was: longer than an owner is waited for.
        """
        draft = self.path.with_name(f"{LOCK_NAME}.{self._token}.tmp")
        with suppress(OSError):
            draft.touch()
            draft.unlink()

    def _remove_stale(self, owner: dict[str, Any]) -> None:
        """Take a dead owner's file away, and only that: another job may have been quicker."""
        with _alone_in(self.path.parent):
            if self._read_patiently() == owner:
                self._move_aside(owner)

    def _move_aside(self, owner: dict[str, Any]) -> None:
        """As `_remove_stale` where jobs on other hosts do the same at this moment."""
        aside = self.path.with_name(f"{LOCK_NAME}.{self._token}.stale")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _owner_in(aside) != owner:
            # It was the quicker job's new lock. Give it back; it is never missing for its owner.
            try:
                os.link(aside, self.path)
            except FileExistsError:
                pass
        aside.unlink()

    def _keep_alive(self) -> None:
        failing = False
        while not self._stop.wait(self.beat):
            self._count += 1
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
            owner = self._read()
        except OSError as error:  # no sign that it is another's
            return str(error)
        if owner == {}:
            return "its content is damaged"  # as where another job is just writing it
        if owner is None or owner.get("token") != self._token:
            now = owner or {}
            self.lost = (
                f"{self.path} was taken away from this job by process {now.get('pid')} on "
                f"{now.get('host')}, or removed"
            )
            return ""
        draft = self.path.with_name(f"{LOCK_NAME}.{self._token}.tmp")
        try:
            draft.write_text(self._content(), encoding="utf-8")
            os.replace(draft, self.path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            return str(error)
        return ""


def _owner_in(path: Path) -> dict[str, Any] | None:
    """Return whom a lock file names: None without a file, {} where it is damaged.

    Raises:
        OSError: it cannot be read, or something that is no file bears the name.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        owner = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        # A link to nowhere keeps a lock from being made as a file does.
        return {} if path.is_symlink() else None
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


@contextmanager
def _alone_in(folder: Path) -> Generator[None, None, None]:
    """Let one process at a time in, as far as the file system's advisory locks reach."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _host() -> str:
    """Name this host, and the namespace in which its process ids mean something."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space}".strip()


def _start_time(pid: int) -> str | None:
    """Return when a process of this host started, None if it is gone; tells reused ids apart."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, UnicodeDecodeError):
        return None
    else:
        # Fields after the parenthesised name, which may hold anything: state is the first of them.
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "unknown"
