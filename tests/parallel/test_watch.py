"""Who is to blame for a broken collective, told from signs of life in a store."""

import logging
import threading
import time
from collections.abc import Generator

import pytest
import torch.distributed as dist

from megafp8.errors import PeerError
from megafp8.parallel.watch import Watch, _broken_collective
from tests.support.limits import PATIENCE_S

TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"
CLOSED = "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"


def wrapped(text: str) -> RuntimeError:
    """As torch's pipeline schedules raise what went wrong in a stage."""
    try:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            raise RuntimeError("[Stage 1] failed to run forward: args: ...") from error
    except RuntimeError as error:
        return error


@pytest.fixture
def three() -> Generator[list[Watch], None, None]:
    """Three ranks in one process; each gives signs of life until its `_stop` is set."""
    store = dist.HashStore()
    watches = [Watch(rank, 3, beat=0.05) for rank in range(3)]
    for watch in watches:
        watch._store = store
        watch.place = "iteration 7"
        threading.Thread(target=watch._live, daemon=True).start()
    yield watches
    for watch in watches:
        watch._stop.set()


def leave(watch: Watch, error: BaseException) -> BaseException:
    """Let an error out of the watch; what came out."""
    try:
        watch.__exit__(type(error), error, None)
    except PeerError as peer:
        return peer
    return error


def leave_together(errors: dict[Watch, BaseException]) -> list[BaseException]:
    found: dict[Watch, BaseException] = {}

    def one(watch: Watch, error: BaseException) -> None:
        found[watch] = leave(watch, error)

    threads = [threading.Thread(target=one, args=item) for item in errors.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[watch] for watch in errors]


def test_a_collective_is_found_behind_what_wraps_it() -> None:
    assert str(_broken_collective(wrapped(TIMED_OUT))) == TIMED_OUT
    assert str(_broken_collective(RuntimeError(CLOSED))) == CLOSED
    assert _broken_collective(wrapped("shapes differ")) is None
    assert _broken_collective(ValueError(TIMED_OUT)) is None
    hidden = wrapped(TIMED_OUT)
    hidden.__cause__ = None  # `raise ... from None`
    assert _broken_collective(hidden) is None


def test_a_failure_of_its_own_is_told_to_the_others(three: list[Watch]) -> None:
    assert isinstance(leave(three[2], ValueError("planted")), ValueError)
    peers = leave_together({three[0]: wrapped(CLOSED), three[1]: RuntimeError(CLOSED)})
    for peer in peers:
        assert "rank 2 failed first, at iteration 7: ValueError: planted; rank " in str(peer)
    assert [peer.speaks for peer in peers] == [True, False]  # type: ignore[attr-defined]


def test_a_silent_rank_is_named_by_all(three: list[Watch]) -> None:
    three[1]._stop.set()
    peers = leave_together({three[0]: RuntimeError(TIMED_OUT), three[2]: wrapped(TIMED_OUT)})
    assert all("rank 1" in str(peer) and "no sign of life" in str(peer) for peer in peers), peers
    assert [peer.speaks for peer in peers] == [True, False]  # type: ignore[attr-defined]


def test_a_late_rank_is_named_and_does_not_blame_the_others(three: list[Watch]) -> None:
    three[0].place = "the save after iteration 7"
    peers = leave_together({three[1]: RuntimeError(TIMED_OUT), three[2]: wrapped(TIMED_OUT)})
    for peer in peers:
        assert "rank 0" in str(peer) and "not where the others waited" in str(peer), peer
        assert "the save after iteration 7" in str(peer)
    assert [peer.speaks for peer in peers] == [True, False]  # type: ignore[attr-defined]
    own = leave(three[0], RuntimeError(CLOSED))
    assert "rank 0 failed first, at the save after iteration 7: alive, but not where" in str(own)


def test_a_rank_that_comes_while_the_others_ask_is_the_late_one(three: list[Watch]) -> None:
    """It finds their connections closed, which does not make it one that waited in vain."""
    peers = leave_together(
        {
            three[0]: RuntimeError(TIMED_OUT),
            three[1]: RuntimeError(CLOSED),
            three[2]: RuntimeError(TIMED_OUT),
        }
    )
    for peer in peers:
        assert "rank 1" in str(peer) and "not where the others waited" in str(peer), peer


def test_nobody_is_blamed_where_connections_break_between_living_ranks(three: list[Watch]) -> None:
    errors = {watch: RuntimeError(CLOSED) for watch in three}
    assert leave_together(errors) == list(errors.values())


def test_an_interrupt_is_told_as_one(three: list[Watch]) -> None:
    leave(three[0], KeyboardInterrupt())
    assert "rank 0 failed first, at iteration 7: interrupted (SIGINT)" in str(
        leave(three[1], RuntimeError(CLOSED))
    )


def test_a_failure_is_told_by_a_rank_whose_main_thread_waits_on(
    three: list[Watch], caplog: pytest.LogCaptureFixture
) -> None:
    """As in a wait for a GPU, which NCCL's watchdog ends together with the process."""
    with caplog.at_level(logging.ERROR, logger="megafp8"):
        leave(three[2], ValueError("planted"))
        limit = time.monotonic() + PATIENCE_S
        while not caplog.records:
            assert time.monotonic() < limit
            time.sleep(0.02)
        time.sleep(0.5)
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert line == (
        "rank 2 failed first, at iteration 7: ValueError: planted; this rank is at iteration 7 "
        "and waits"
    )


def test_a_rank_that_leaves_has_no_need_of_that(
    three: list[Watch], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="megafp8"):
        three[0]._leaving = True  # its main thread asks, or cleans up
        leave(three[2], ValueError("planted"))
        time.sleep(0.5)
    assert not caplog.records
