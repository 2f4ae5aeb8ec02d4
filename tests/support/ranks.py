"""Runs functions on N gloo ranks, in processes that live as long as the test session.

    def sums(scale):                       # at module level of a test file
        t = torch.ones(1) * scale
        dist.all_reduce(t)
        return t.item()

    def test_sums(ranks):
        assert ranks.run(sums, world_size=2, scale=3.0) == [6.0, 6.0]

A fork server imports torch once; workers are forked from it and kept. Each `run` opens a new
default process group over the first `world_size` workers, and closes it behind a barrier, so tests
share processes and nothing else. After a failure or a timeout all workers are killed and forked
again at the next `run`: a rank that raised may have left the others inside a collective.
"""

import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.limits import PATIENCE_S

_PRELOAD = [
    "numpy",
    "pydantic",
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.debug",
    # So that workers which replace others need not import them.
    "megafp8.checkpoint",
    "megafp8.data.loader",
    "megafp8.launch.dry_run",
    "megafp8.train.step",
]
# After the first rank has failed, the others get this long to report failures of their own.
_GRACE_S = 2.0
_LOG_TAIL = 4000
# A gloo group that something still refers to (models and meshes, which refer to one another, and
# torch's caches) keeps threads that wake up a hundred times a second; those of a few dozen runs
# take a core. With more threads than these after a run, its workers are replaced.
_MOST_THREADS = 100


class RankError(AssertionError):
    """One or more ranks raised, died or did not answer; the message carries their tracebacks."""


@dataclass
class _Worker:
    rank: int
    process: Any
    connection: Any
    log: Path


class Ranks:
    """A set of gloo worker processes, forked when first needed.

    Args:
        size: The most ranks that a `run` may ask for.
        timeout: Seconds after which a `run` is given up, unless it says otherwise.
    """

    def __init__(self, size: int = 4, timeout: float = PATIENCE_S) -> None:
        self.size = size
        self.timeout = timeout
        self._workers: list[_Worker] = []
        self._folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        self._runs = 0
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        /,
        *,
        world_size: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `function(**kwargs)` on ranks 0..world_size-1 of a new default process group.

        Args:
            function: A function at module level; the workers import it by name, so a change of
                module globals in the test process does not reach them.
            world_size: Ranks; all of them if not given.
            timeout: Seconds for the whole run; the group's collectives get the same limit.
            **kwargs: Passed on, pickled by value.

        Returns:
            What each rank returned, by rank, pickled by value.

        Raises:
            RankError: a rank raised, died or did not answer in time. The ranks are named and the
                traceback of the first to fail comes first.
        """
        world_size = self.size if world_size is None else world_size
        timeout = self.timeout if timeout is None else timeout
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size {world_size} is not within 1..{self.size}")
        self._start(world_size)
        self._runs += 1
        job = {
            "function": _reference(function),
            "kwargs": kwargs,
            "world_size": world_size,
            "timeout": timeout,
            "store": str(self._folder / f"store_{self._runs}"),
            "sys_path": sys.path,
        }
        payload = pickle.dumps(job)
        workers = self._workers[:world_size]
        starts = [worker.log.stat().st_size for worker in workers]
        deadline = time.monotonic() + timeout
        try:
            for worker in workers:
                worker.connection.send_bytes(payload)
            results = self._collect(workers, "result", deadline, function)
            for worker in workers:
                worker.connection.send_bytes(b"close")
            threads = self._collect(workers, "closed", deadline, function)
        except _RunFailed as failure:
            text = _report(failure, function, workers, starts)
            self._kill()
            raise RankError(text) from None
        except BaseException:
            self._kill()
            raise
        finally:
            Path(job["store"]).unlink(missing_ok=True)
        if max(threads.values()) > _MOST_THREADS:
            self._kill()
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all workers; a later `run` starts new ones."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.close()  # a worker ends when its connection does
        limit = time.monotonic() + 5.0
        for worker in self._workers:
            worker.process.join(max(0.0, limit - time.monotonic()))
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _start(self, count: int) -> None:
        self._folder.mkdir(exist_ok=True)
        if any(not worker.process.is_alive() for worker in self._workers):
            self._kill()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        for rank in range(len(self._workers), count):
            log = self._folder / f"rank_{rank}.log"
            log.write_bytes(b"")
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, str(log)), name=f"test rank {rank}"
            )
            # The fork server inherits this; torch reads it once, when it is imported there.
            former = os.environ.get("OMP_NUM_THREADS")
            os.environ["OMP_NUM_THREADS"] = "1"
            try:
                process.start()
            finally:
                if former is None:
                    del os.environ["OMP_NUM_THREADS"]
                else:
                    os.environ["OMP_NUM_THREADS"] = former
            theirs.close()
            self._workers.append(_Worker(rank, process, ours, log))

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []

    def _collect(
        self, workers: list[_Worker], kind: str, deadline: float, function: Callable[..., Any]
    ) -> dict[int, Any]:
        """Wait for one answer of each worker; {rank: value}, or `_RunFailed`."""
        waiting = {worker.connection: worker for worker in workers}
        values: dict[int, Any] = {}
        failures: dict[int, str] = {}
        limit = deadline
        while waiting:
            left = limit - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, left))
            if not ready and left <= 0:
                break
            for connection in ready:
                worker = waiting.pop(connection)
                try:
                    found, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    worker.process.join(5.0)
                    found, value = "error", f"died with exit code {worker.process.exitcode}\n"
                if found == kind:
                    values[worker.rank] = value
                else:
                    assert found == "error", found
                    failures[worker.rank] = value
                    limit = min(limit, time.monotonic() + _GRACE_S)
        if failures or waiting:
            raise _RunFailed(failures, sorted(worker.rank for worker in waiting.values()))
        return values


class _RunFailed(Exception):
    """Failures by rank in the order of arrival, and the ranks that did not answer."""

    def __init__(self, failures: dict[int, str], silent: list[int]) -> None:
        super().__init__()
        self.failures = failures
        self.silent = silent


def _report(
    failure: _RunFailed, function: Callable[..., Any], workers: list[_Worker], starts: list[int]
) -> str:
    name = f"{function.__module__}.{function.__qualname__}"
    parts = []
    for rank, text in failure.failures.items():
        parts.append(f"rank {rank} of {len(workers)} failed in {name}:\n{text}")
        printed = _log_since(workers[rank].log, starts[rank])
        if printed:
            parts.append(f"rank {rank} had printed:\n{printed}")
    for rank in failure.silent:
        # faulthandler writes the rank's Python stack into its log.
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[rank].process.pid, signal.SIGUSR2)
    if failure.silent:
        time.sleep(0.3)
    for rank in failure.silent:
        when = "when another failed" if failure.failures else "in time"
        parts.append(
            f"rank {rank} of {len(workers)} had not answered {when}, {name}; it was at:\n"
            + _log_since(workers[rank].log, starts[rank])
        )
    return "\n".join(parts)


def _log_since(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")[-_LOG_TAIL:]


def _reference(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return (module, name, file), checked to lead back to the function."""
    module = sys.modules.get(function.__module__)
    name = function.__qualname__
    if getattr(module, name, None) is not function:
        raise TypeError(f"{name} of {function.__module__} is not a function at module level")
    return function.__module__, name, str(getattr(module, "__file__", ""))


# ------------------------------------------------------------------------------ in the workers


def _serve(connection: Any, rank: int, log: str) -> None:
    """Answer jobs until the connection ends."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), line_buffering=True)
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    if sys.platform == "linux":
        # All ranks are on this machine, and its host name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = ("result", _call(job, rank))
            connection.send_bytes(pickle.dumps(answer))
        except BaseException:  # SystemExit too: the worker has to outlive it and tell
            connection.send_bytes(pickle.dumps(("error", traceback.format_exc())))
            continue  # the parent kills this process; leaving the group could block
        try:
            if connection.recv_bytes() != b"close":
                return
        except EOFError:
            return
        try:
            _leave()
        except BaseException:
            connection.send_bytes(pickle.dumps(("error", traceback.format_exc())))
            continue
        connection.send_bytes(pickle.dumps(("closed", _count_threads())))


def _call(job: dict[str, Any], rank: int) -> Any:
    import torch
    import torch.distributed as dist

    for entry in job["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    function = _resolve(*job["function"])
    random.seed(1234)
    torch.manual_seed(1234)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1234)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job["store"], job["world_size"]),
        rank=rank,
        world_size=job["world_size"],
        timeout=timedelta(seconds=job["timeout"]),
    )
    return function(**job["kwargs"])


def _leave() -> None:
    """Close the process group and forget what torch caches about its meshes."""
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # Without the barrier gloo aborts a rank whose peer has closed its sockets first.
    dist.barrier()
    dist.destroy_process_group()
    # Cached results refer to meshes by the names of their groups, which the next world uses anew.
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()


def _count_threads() -> int:
    tasks = Path("/proc/self/task")  # threading.active_count knows Python's own alone
    return len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()


def _resolve(module_name: str, name: str, file: str) -> Callable[..., Any]:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name or not file:
            raise
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None, file
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(module, name)
