"""Whole runs of `pretrain_gpt.py` on N gloo ranks, in processes of their own that may be killed.

    with launched(2, ["--train-iters", "4", ...], folder) as run:
        run.signal(signal.SIGTERM, 1)
        assert run.wait() == [75, 75]

The processes are forked from a server that has torch loaded, so a start costs a second. Whatever a
test does, none of them outlives the `with` block.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from tests.support.limits import PATIENCE_S
from tests.support.ranks import _PRELOAD

# One block of 32 channels: an iteration of two ranks takes a few hundredths of a second.
TINY = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--group-query-attention", "--num-query-groups", "2", "--ffn-hidden-size", "32", "--swiglu"),
    *("--normalization", "RMSNorm", "--disable-bias-linear", "--seq-length", "16"),
    *("--max-position-embeddings", "16", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--make-vocab-size-divisible-by", "4"),
    *("--hidden-dropout", "0.1", "--attention-dropout", "0", "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "51", "--lr", "1e-3"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--log-interval", "1"),
    *("--bf16", "--fp8-format", "hybrid", "--fp8-amax-history-len", "2"),
    *("--distributed-timeout-minutes", "3"),
)


MASTER_ADDR = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Run:
    """Ranks of one run.

    Attributes:
        processes: by rank.
        logs: stdout and stderr of each.
    """

    def __init__(
        self, size: int, argv: Sequence[str], folder: Path, patch: tuple[str, dict[str, Any]] | None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        port = free_port()
        self.logs = [folder / f"rank_{rank}.log" for rank in range(size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": MASTER_ADDR,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            }
            process = context.Process(
                target=_rank, args=(list(argv), environment, str(log), list(sys.path), patch)
            )
            process.start()
            self.processes.append(process)

    def wait(self, timeout: float = PATIENCE_S) -> list[int]:
        """Exit codes by rank; a killed one has the negative signal number.

        Raises:
            AssertionError: a rank still runs after `timeout` seconds; with all output.
        """
        limit = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, limit - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, f"{codes} after {timeout:g} s:\n{self.text()}"
        return [code for code in codes if code is not None]

    def wait_for(self, text: str, rank: int = 0, timeout: float = PATIENCE_S) -> None:
        """Wait until a rank has printed a text."""
        limit = time.monotonic() + timeout
        while text not in self.output(rank):
            alive = self.processes[rank].is_alive()
            assert alive and time.monotonic() < limit, f"no {text!r}:\n{self.text()}"
            time.sleep(0.01)

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, to all if none are named."""
        for rank in ranks or range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def kill(self) -> None:
        """SIGKILL to all ranks, as near to at once as can be."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def output(self, rank: int) -> str:
        log = self.logs[rank]
        return log.read_text(errors="replace") if log.exists() else ""

    def text(self) -> str:
        return "\n".join(f"rank {r}:\n{self.output(r)}" for r in range(len(self.logs)))


@contextlib.contextmanager
def launched(
    size: int,
    argv: Sequence[str],
    folder: Path,
    patch: tuple[str, dict[str, Any]] | None = None,
) -> Generator[Run, None, None]:
    """Start a run.

    Args:
        size: Ranks.
        argv: Command line.
        folder: For the logs.
        patch: Called on every rank before training, as ("module:function", keyword arguments), to
            plant a fault.
    """
    run = Run(size, argv, folder, patch)
    try:
        yield run
    finally:
        run.kill()


def train(size: int, argv: Sequence[str], folder: Path, timeout: float = PATIENCE_S) -> Run:
    """A run to its end, which must be a good one."""
    with launched(size, argv, folder) as run:
        codes = run.wait(timeout)
        assert codes == [0] * size, f"{codes}\n{run.text()}"
    return run


def _rank(
    argv: list[str],
    environment: dict[str, str],
    log: str,
    path: list[str],
    patch: tuple[str, dict[str, Any]] | None,
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    sys.path[:] = path
    import torch

    torch.set_num_threads(1)
    if patch is not None:
        module, _, name = patch[0].partition(":")
        getattr(importlib.import_module(module), name)(**patch[1])
    from megafp8.launch.main import run_program

    run_program(argv)
