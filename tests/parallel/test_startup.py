"""Joining and leaving the process group, and requests that cannot be met."""

import pytest
import torch
import torch.distributed as dist

from megafp8.errors import LaunchError
from megafp8.parallel import start, stop
from megafp8.parallel.startup import choose_backend


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
