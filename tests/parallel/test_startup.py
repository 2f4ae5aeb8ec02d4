"""Joining and leaving the process group, and requests that cannot be met."""

import logging
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megafp8.errors import LaunchError, MeetingError, PeerError
from megafp8.parallel import rendezvous, start, stop
from megafp8.parallel.meeting import Meeting
from megafp8.parallel.rendezvous import Rendezvous
from megafp8.parallel.startup import choose_backend, watch_over
from megafp8.parallel.watch import Watch
from tests.support.launches import free_port
from tests.support.limits import PATIENCE_S


def test_one_process_needs_no_rendezvous(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = start(0, 1, 0, backend="gloo")
    try:
        assert (world.rank, world.size, world.device.type, world.backend) == (0, 1, "cpu", "gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 1
    finally:
        stop()
    assert not dist.is_initialized()
    stop()  # a second call does nothing


@pytest.mark.parametrize("present", [(), ("MASTER_ADDR",), ("MASTER_PORT",)])
def test_several_processes_need_a_rendezvous(monkeypatch, present):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name in present:
        monkeypatch.setenv(name, "1")
    with pytest.raises(LaunchError) as raised:
        start(0, 2, 0, backend="gloo")
    missing = {"MASTER_ADDR", "MASTER_PORT"} - set(present)
    assert all(name in str(raised.value) for name in missing)
    assert "world size 2" in str(raised.value) and "torchrun" in str(raised.value)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_nccl_without_cuda_is_refused():
    with pytest.raises(LaunchError, match="--distributed-backend: found nccl"):
        choose_backend("nccl")


def test_backend_follows_the_device():
    assert choose_backend("gloo") == "gloo"
    assert choose_backend(None) == ("nccl" if torch.cuda.is_available() else "gloo")


@pytest.mark.parametrize("port", ["", "x", "0", "65536", "-1"])
def test_a_port_that_is_none_is_refused(monkeypatch, port):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(LaunchError, match="MASTER_PORT"):
        watch_over(0, 2)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"MASTER_PORT: found {port}, which another program"):
            Rendezvous("127.0.0.1", port, 0, 2).open(threading.Event())


def test_a_name_that_does_not_resolve_is_an_error(monkeypatch):
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0.0)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR: found none\.invalid does not resolve: "):
        Rendezvous("none.invalid", 29500, 1, 2).open(threading.Event())


def watches(size, **changes):
    """Watches of some ranks that meet at a port of this machine, in threads of this process."""
    port = free_port()
    return [
        Watch(rank, size, rendezvous=Rendezvous("127.0.0.1", port, rank, size), **changes)
        for rank in range(size)
    ]


def meet_in_threads(some, timeout, late=PATIENCE_S, apart=0.0):
    """What `meet` returned or raised, by watch; they come so many seconds apart."""
    found = [None] * len(some)

    def one(place, watch):
        try:
            with watch:
                found[place] = watch.meet(timedelta(seconds=timeout), timedelta(seconds=late))
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=one, args=item) for item in enumerate(some)]
    for thread in threads:
        thread.start()
        time.sleep(apart)
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


def test_all_ranks_meet_at_one_store():
    stores = meet_in_threads(watches(3), PATIENCE_S)
    stores[2].set("key", "value")
    assert stores[0].get("key") == stores[1].get("key") == b"value"


def test_the_ranks_that_are_missing_are_counted_and_named():
    ranks = watches(4)
    found = meet_in_threads([ranks[0], ranks[2]], 1.0)
    assert isinstance(found[0], MeetingError) and found[0].speaks
    address = f"127.0.0.1:{ranks[0]._rendezvous.port}"
    assert str(found[0]).startswith(
        f"rank 0 waits for 2 of 4 ranks at {address}: rank 1 (no sign of it yet), rank 3 (no sign "
        "of it yet): no sign of life for 1 s"
    )
    # The others are told by rank 0, or find its store gone.
    assert isinstance(found[1], (PeerError, MeetingError)), found[1]


def test_a_rank_that_lives_may_be_late():
    """It is not bound by the time that one without a sign of life has."""
    ranks = watches(2, beat=0.1)
    with ranks[1]:
        ranks[1].place = "the opening of the data"
        (error,) = meet_in_threads(ranks[:1], 0.5, 2.0)
    assert isinstance(error, MeetingError)
    assert "rank 1 (the opening of the data): alive, but not here for 2 s" in str(error)


def test_a_late_rank_is_named_whoever_came_first():
    """Rank 1 comes before rank 0, and knows nothing but whether that is there."""
    ranks = watches(3, beat=0.1)
    with ranks[2]:
        ranks[2].place = "the opening of the data"
        errors = meet_in_threads([ranks[1], ranks[0]], PATIENCE_S, 2.0, apart=1.0)
    for error in errors:
        assert "rank 2 (the opening of the data): alive, but not here for 2 s" in str(error)
    assert isinstance(errors[0], PeerError) and isinstance(errors[1], MeetingError)


def test_a_failure_is_not_pointed_out_at_once_while_ranks_meet(caplog):
    """Signs of life follow each other more closely there."""
    ranks = watches(2, beat=PATIENCE_S)
    with caplog.at_level(logging.ERROR, logger="megafp8"), ranks[0]:
        with pytest.raises(ValueError, match="planted"), ranks[1]:
            raise ValueError("planted")
        limit = time.monotonic() + PATIENCE_S
        while not ranks[0]._failed:
            assert time.monotonic() < limit
            time.sleep(0.02)
        time.sleep(2.0)
    assert not caplog.records


def test_the_process_group_gets_a_store_with_its_own_time_limit(monkeypatch):
    """Ranks may be as far apart there as in any collective."""
    found = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, store, **__: found.append(store.timeout)
    )
    ranks = watches(2)
    other = threading.Thread(target=meet_in_threads, args=(ranks[1:], PATIENCE_S))
    other.start()
    with ranks[0]:
        start(0, 2, 0, backend="gloo", timeout_minutes=7, watch=ranks[0])
        assert found == [timedelta(minutes=7)]
        assert ranks[0]._store.timeout < timedelta(minutes=1)
    other.join(PATIENCE_S)


def test_many_missing_ranks_are_not_all_named():
    meeting = Meeting(0, 100, "host:1")
    assert meeting.text("").endswith("rank 8 (no sign of it yet) and 91 more")
    assert meeting.text("").startswith("rank 0 waits for 99 of 100 ranks at host:1: rank 1 (")


def test_a_rank_without_the_store_waits_for_rank_0():
    began = time.monotonic()
    (error,) = meet_in_threads(watches(2)[1:], 1.0)
    assert isinstance(error, MeetingError) and error.speaks and time.monotonic() - began < 30.0
    assert "rank 1 waits for 1 of 2 ranks" in str(error)
    assert "rank 0, which opens the store there; nobody answers there yet" in str(error)
