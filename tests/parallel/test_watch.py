"""Who is to blame for a broken collective, told from signs of life in a store."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator

import pytest
import torch.distributed as dist

from megafp8.errors import PeerError, StoppedBySignal
from megafp8.parallel.broken import broken_collective
from megafp8.parallel.watch import Watch
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


def await_true(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


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
    assert str(broken_collective(wrapped(TIMED_OUT))) == TIMED_OUT
    assert str(broken_collective(RuntimeError(CLOSED))) == CLOSED
    assert broken_collective(wrapped("shapes differ")) is None
    assert broken_collective(ValueError(TIMED_OUT)) is None
    hidden = wrapped(TIMED_OUT)
    hidden.__cause__ = None  # `raise ... from None`
    assert broken_collective(hidden) is None


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
        await_true(lambda: bool(caplog.records))
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


def test_a_launchers_signal_is_not_told_in_place_of_the_failure_before_it(
    three: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends SIGTERM to the others as soon as one rank has left; nobody follows those."""
    followed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: followed.append(number))
    for watch in three:
        watch.setting_up = True
    leave(three[2], ValueError("planted"))
    told = leave(three[1], StoppedBySignal(signal.SIGTERM))
    await_true(lambda: bool(three[0]._failed))
    time.sleep(0.2)
    assert "rank 2 failed first, at iteration 7: ValueError: planted; rank 1" in str(told)
    assert "rank 2 failed first" in three[0].fault and not followed


def test_a_signal_is_followed_in_the_set_up(
    three: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda process, number: followed.append(number))
    three[0].setting_up = three[1].setting_up = True
    ended = StoppedBySignal(signal.SIGTERM)
    assert leave(three[1], ended) is ended
    await_true(lambda: bool(followed))
    assert followed == [signal.SIGTERM] and not three[0].fault


@pytest.mark.parametrize("own", [True, False])
def test_a_signal_to_a_rank_that_leaves_changes_nothing(
    three: list[Watch], monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """It comes while the rank asks who failed, or waits until the others have heard of it."""
    error = ValueError("own") if own else RuntimeError(CLOSED)
    if not own:
        leave(three[2], ValueError("planted"))

    def signalled(seconds: float) -> None:
        raise StoppedBySignal(signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", signalled)
    told = leave(three[0], error)
    assert told is error if own else "rank 2 failed first" in str(told)


def test_a_rank_whose_signal_the_others_followed_was_ended_by_it(three: list[Watch]) -> None:
    """Its collective breaks as they leave; nobody else has failed."""
    three[2].setting_up = True
    three[2]._asked = lambda: signal.SIGTERM
    await_true(lambda: bool(three[2]._failed))
    with pytest.raises(StoppedBySignal):
        leave(three[2], RuntimeError(CLOSED))


def test_a_signal_that_ended_nobody_is_no_failure(three: list[Watch]) -> None:
    """It came when the ranks had begun to ask each other for signals, and the run went on."""
    three[2].setting_up = True
    three[2]._asked = lambda: signal.SIGTERM
    await_true(lambda: three[0]._failed != "" != three[1]._failed)
    three[2].setting_up = False
    await_true(lambda: not any(watch._failed for watch in three))
    leave(three[1], ValueError("planted"))
    assert "rank 1 failed first" in str(leave(three[0], RuntimeError(CLOSED)))
