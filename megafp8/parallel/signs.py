"""Signs of life that ranks leave in the rendezvous store, and the ranks that leave none."""

import time
from typing import Any

from megafp8.log import get_logger

log = get_logger(__name__)


class SignsOfLife:
    """What this rank leaves there, and what it has seen of the others.

    A sign is "count place": the count tells a living rank from one that stands still, the place
    what it is doing.

    Args:
        rank: This rank.
        silence: Seconds without a new sign after which a rank is called silent.
    """

    def __init__(self, rank: int, silence: float) -> None:
        self.rank, self.silence = rank, silence
        self._seen: dict[int, tuple[str, float]] = {}  # the newest sign, and since when it is that
        self._called: set[int] = set()

    def leave(self, store: Any, count: int, place: str) -> None:
        """Leave this rank's sign."""
        store.set(f"life_{self.rank}", f"{count} {place}")

    def of(self, store: Any, ranks: list[int]) -> dict[int, str]:
        """Return the newest sign of each of `ranks`, "" where there was none."""
        keys = [f"life_{rank}" for rank in ranks]
        # multi_get would wait for a key that nobody has set yet.
        present = [rank for rank, key in zip(ranks, keys, strict=True) if store.check([key])]
        values = store.multi_get([f"life_{rank}" for rank in present]) if present else []
        signs = {rank: value.decode() for rank, value in zip(present, values, strict=True)}
        return {rank: signs.get(rank, "") for rank in ranks}

    def call_silent(self, store: Any, ranks: list[int], place: str) -> None:
        """Tell of `ranks` that have been silent for long; a collective with them may hang.

        Args:
            store: Where signs are.
            ranks: To look after.
            place: What this rank is doing.
        """
        now = time.monotonic()
        for rank, sign in self.of(store, ranks).items():
            former, since = self._seen.setdefault(rank, (sign, now))
            if sign != former:
                self._seen[rank] = (sign, now)
                # It lives again: told once more if it falls silent once more.
                self._called.discard(rank)
            elif now - since > self.silence and rank not in self._called:
                self._called.add(rank)
                log.error(
                    "rank %d has given no sign of life for %.0f s (it was at %s): stopped, killed "
                    "or cut off; this rank is at %s",
                    rank,
                    now - since,
                    sign.partition(" ")[2] or "set-up",
                    place,
                )
