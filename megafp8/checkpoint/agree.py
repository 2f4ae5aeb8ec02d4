"""Steps that succeed on all ranks or raise the same error on all of them.

A rank that raises alone leaves the others in their next collective until it times out. Here each
rank's failure travels as text with the result, so that every rank learns of it at the same place.
Without a process group everything runs in this one process.
"""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from megafp8.errors import CheckpointError, MegaFP8Error

T = TypeVar("T")


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in `group` and the group's size; (0, 1) without a process group.

    Args:
        group: A process group, or None for the default one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def on_all_ranks(step: str, work: Callable[[], T], group: dist.ProcessGroup | None) -> list[T]:
    """Run `work` on every rank and return all results by rank, the same list everywhere.

    Args:
        step: What is done, the head of an error message.
        work: Returns something picklable. It must not call a collective itself: a rank that
            raises before it would leave the others waiting inside.
        group: The ranks that take part; all of them call this together.

    Raises:
        CheckpointError: on every rank, if `work` raised on any of them.
    """
    outcomes, error = _outcomes(work, group)
    failures = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
    if failures:
        raise CheckpointError(f"{step}: {join_failures(failures, len(outcomes))}") from error
    return [cast(T, value) for value, _ in outcomes]


def _outcomes(
    work: Callable[[], T], group: dist.ProcessGroup | None
) -> tuple[list[tuple[T | None, str | None]], Exception | None]:
    """Return each rank's (result, failure), and this rank's own exception."""
    error: Exception | None = None
    outcome: tuple[T | None, str | None]
    try:
        outcome = (work(), None)
    except Exception as caught:  # whatever it is, the other ranks have to hear of it
        error = caught
        outcome = (None, describe(caught))
    _, size = rank_and_size(group)
    outcomes: list[tuple[T | None, str | None]] = [outcome]
    if size > 1:
        outcomes = outcomes * size
        dist.all_gather_object(outcomes, outcome, group=group)
    return outcomes, error


def on_first_rank(step: str, work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on the group's first rank and return its result on every rank.

    Raises:
        CheckpointError: on every rank, if `work` raised.
    """
    rank, _ = rank_and_size(group)

    def first_only() -> T | None:
        return work() if rank == 0 else None

    outcomes, error = _outcomes(first_only, group)
    value, failure = outcomes[0]
    if failure is not None:
        raise CheckpointError(f"{step}: {failure}") from error
    return cast(T, value)


def describe(error: BaseException) -> str:
    """Return an error as one line; the type is left out where the message was written for users."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MegaFP8Error) else f"{type(error).__name__}: {text}"


def join_failures(failures: dict[int, str], size: int) -> str:
    """Return one line for the failures of several ranks, each text once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in sorted(failures.items()):
        ranks.setdefault(text, []).append(rank)
    parts = []
    for text, owners in ranks.items():
        everyone = len(owners) == size
        where = "rank" if len(owners) == 1 else "ranks"
        numbers = ", ".join(str(rank) for rank in owners)
        parts.append(text if everyone else f"{where} {numbers}: {text}")
    return "; ".join(parts)
