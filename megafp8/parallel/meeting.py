"""Who has come to the rendezvous: rank 0 counts, the others wait for its word.

One rank that counts keeps a store of thousands of ranks from being asked by each about each.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

PLACE = "the meeting of ranks"
_NAMED = 8  # ranks that a line names


class Meeting:
    """The ranks that this rank waits for, from when it begins to look for them.

    A thread calls `look` again and again; what it finds is there for the main thread to read.

    Args:
        rank: This rank.
        size: Ranks in all.
        address: Of the rendezvous.

    Attributes:
        arrived: Set once this rank has come itself.
        complete: All have come.
    """

    def __init__(self, rank: int, size: int, address: str) -> None:
        self.rank, self.size, self.address = rank, size, address
        self.arrived = self.complete = False
        self._announced = False
        self._missing = list(range(size)) if rank == 0 else [0]
        self._heard: dict[int, tuple[str, float]] = {}

    def look(self, store: Any, signs: Callable[[list[int]], dict[int, str]]) -> None:
        """Announce this rank once it has come, and find out who is missing.

        Args:
            store: Connection to the rendezvous store.
            signs: Returns the last sign of life of some ranks, "" where there was none.
        """
        if self.arrived and not self._announced:
            store.set(f"joined_{self.rank}", "")
            self._announced = True
        if self.rank == 0:
            # only those not seen yet are asked for again
            self._missing = _absent(store, self._missing)
            if not self._missing:
                store.set("all_joined", "")
                self.complete = True
        elif self._announced:
            self.complete = store.check(["all_joined"])
        if not self.complete:
            now = time.monotonic()
            for rank, sign in signs(self._missing).items():
                if sign != self._heard.get(rank, ("", 0.0))[0]:
                    self._heard[rank] = (sign, now)

    def quiet(self, since: float, seconds: float) -> list[int]:
        """The missing ranks that have given no sign of life for so long, counted from `since`."""
        # A rank is quiet if neither its last sign nor the beginning of the wait is younger than
        # this.
        limit = time.monotonic() - seconds
        return [r for r in self.others if max(since, self._heard.get(r, ("", 0.0))[1]) < limit]

    @property
    def others(self) -> list[int]:
        """The missing ranks but this one."""
        return [rank for rank in self._missing if rank != self.rank]

    def counts(self) -> bool:
        """Whether it is this rank's to say who is late: rank 0's, or all's where that is missing.

        The others know nothing but whether rank 0 is there.
        """
        return self.rank == 0 or self._place(0) != PLACE

    def speaks(self) -> bool:
        """Whether this rank is the one that tells: rank 0, or rank 1 where that is not there."""
        return self.rank < 2 and self.counts()

    def text(self, trouble: str) -> str:
        """For whom this rank waits, and where.

        Args:
            trouble: Why there is no connection to the store; "" where there is one.
        """
        others = self.others
        names = ", ".join(self._name(rank) for rank in others[:_NAMED])
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        if trouble:
            names, more = f"rank 0, which opens the store there; {trouble}", ""
        return (
            f"rank {self.rank} waits for {len(others)} of {self.size} ranks at {self.address}: "
            f"{names}{more}"
        )

    def _place(self, rank: int) -> str:
        return self._heard.get(rank, ("", 0.0))[0].partition(" ")[2]

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._place(rank) or 'no sign of it yet'})"


def _absent(store: Any, ranks: list[int]) -> list[int]:
    keys = [f"joined_{rank}" for rank in ranks]
    if store.check(keys):  # one question for all, as most often all that is needed
        return []
    return [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]


def gave_up(waits: str, limit: timedelta, reason: str) -> str:
    """The end of a wait.

    Args:
        waits: what `Meeting.text` says.
        limit: of the wait.
        reason: how the missing ranks looked.
    """
    return (
        f"{waits}: {reason} for {limit.total_seconds():g} s; look at what the missing ranks "
        "printed, or give more --distributed-timeout-minutes"
    )
