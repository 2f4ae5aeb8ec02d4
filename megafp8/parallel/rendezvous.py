"""The store at which ranks meet: rank 0 or a launcher holds it, the others connect to it.

Torch's own meeting waits inside the library: no signal reaches a rank there, nothing says for whom
it waits, and a host name that does not resolve is retried for as long as ranks may take to come.
"""

import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megafp8.errors import LaunchError

# Names may appear some time after the processes, as those of pods do.
RESOLVE_SECONDS = 20.0
_CONNECT_SECONDS = 2.0
_ANSWER = timedelta(seconds=30)  # of a store that has taken a connection


class Rendezvous:
    """Where ranks meet.

    Args:
        host: of the store.
        port: of the store, 1 to 65535.
        rank: this rank; rank 0 holds the store unless a launcher does.
        size: ranks in all.
        held: a launcher holds the store.
        attempt: of the launcher, which may keep the store when it starts the ranks anew.

    Attributes:
        trouble: why the store is not open yet, in words.
        resolved: whether the host's name has been found to have an address.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, held: bool = False, attempt: str = "0"
    ) -> None:
        self.host, self.port, self.rank, self.size = host, port, rank, size
        self.held, self.attempt = held, attempt
        self.trouble = ""
        self.resolved = False

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"

    @property
    def unresolved(self) -> str:
        """What to tell of a host's name without an address."""
        return f"MASTER_ADDR: found {self.trouble}; give the name or address of rank 0's host"

    def open(self, stop: threading.Event) -> Any:
        """Return the store, once its holder is there; in a thread that may wait for long.

        Args:
            stop: ends the wait.

        Raises:
            LaunchError: the host's name does not resolve, the port is taken, or whoever answers is
                no store.
        """
        self._resolve(stop)
        holds = self.rank == 0 and not self.held  # torchrun's agent holds the store already
        if not holds:
            self._wait_for_holder(stop)
        try:
            store = dist.TCPStore(
                self.host,
                self.port,
                self.size,
                is_master=holds,
                timeout=_ANSWER,
                # Torch would wait here in silence; `Meeting` counts the ranks and says who is
                # missing.
                wait_for_workers=False,
                multi_tenant=holds,
            )
        except RuntimeError as error:  # DistError: every failure of the store
            if holds and "EADDRINUSE" in str(error):
                raise LaunchError(
                    f"MASTER_PORT: found {self.port}, which another program on this host has; give "
                    "another port, or end that program"
                ) from error
            found = " ".join(str(error).split())[:200]
            raise LaunchError(f"MASTER_ADDR {self.address} is no rendezvous: {found}") from error
        # An earlier attempt's ranks may have left word in a launcher's store.
        return dist.PrefixStore(f"attempt_{self.attempt}", store)  # pyright: ignore[reportPrivateImportUsage]

    def _resolve(self, stop: threading.Event) -> None:
        limit = time.monotonic() + RESOLVE_SECONDS
        while True:
            try:
                self.trouble = f"{self.host} does not resolve: no answer"  # where there is none
                socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                self.trouble, self.resolved = "", True
                return
            except OSError as error:  # gaierror is one
                self.trouble = f"{self.host} does not resolve: {error.strerror or error}"
            if stop.wait(1.0) or time.monotonic() > limit:
                raise LaunchError(self.unresolved)

    def _wait_for_holder(self, stop: threading.Event) -> None:
        pause = 0.05
        while True:
            try:
                socket.create_connection((self.host, self.port), timeout=_CONNECT_SECONDS).close()
                return
            except OSError as error:
                self.trouble = f"nobody answers there yet ({error.strerror or error})"
            if stop.wait(pause):
                raise LaunchError(f"MASTER_ADDR {self.address}: {self.trouble}")
            # Thousands of ranks ask at once: they back off to a second each.
            pause = min(2 * pause, 1.0)
