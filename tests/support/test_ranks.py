"""The harness itself: it must not lose a failure, hang, or carry state from run to run."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.ranks import RankError, Ranks


def sum_of(scale: float) -> tuple[float, int, int, int]:
    total = torch.ones(1) * scale * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.item(), dist.get_rank(), dist.get_world_size(), os.getpid()


def gathered(dims: tuple[int, int]) -> list[float]:
    mesh = init_device_mesh("cpu", dims, mesh_dim_names=("a", "b"))
    full = torch.arange(8.0).reshape(4, 2)
    tensor = distribute_tensor(full, mesh, [Shard(0), Replicate()])
    return (tensor * 2).full_tensor().flatten().tolist()


def draw() -> float:
    return torch.rand(1).item()


def fail_on(rank: int) -> None:
    print("about to fail")
    if dist.get_rank() == rank:
        raise ValueError("this rank's own words")
    dist.barrier()


def leave_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(30.0)


def threads() -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def test_sub_worlds_share_processes(ranks: Ranks) -> None:
    two = ranks.run(sum_of, world_size=2, scale=2.0)
    assert [answer[:3] for answer in two] == [(6.0, 0, 2), (6.0, 1, 2)]
    four = ranks.run(sum_of, scale=1.0)
    assert [answer[:3] for answer in four] == [(10.0, rank, 4) for rank in range(4)]
    one = ranks.run(sum_of, world_size=1, scale=5.0)
    assert one[0][:3] == (5.0, 0, 1)
    assert two[0][3] == four[0][3] == one[0][3] != os.getpid()


def test_meshes_of_one_run_do_not_reach_the_next(ranks: Ranks) -> None:
    expected = [2.0 * value for value in range(8)]
    for dims in ((4, 1), (2, 2), (1, 4), (2, 2)):
        assert ranks.run(gathered, dims=dims) == [expected] * 4
    assert ranks.run(gathered, world_size=2, dims=(2, 1)) == [expected] * 2


def test_each_run_starts_from_the_same_seed(ranks: Ranks) -> None:
    assert ranks.run(draw, world_size=2) == ranks.run(draw, world_size=2)


def test_workers_use_one_thread(ranks: Ranks) -> None:
    assert ranks.run(threads, world_size=2) == [(1, "1")] * 2


def test_failures_name_their_rank_and_the_pool_recovers() -> None:
    pool = Ranks(size=2, timeout=20.0)
    try:
        with pytest.raises(RankError) as raised:
            pool.run(fail_on, rank=1)
        message = str(raised.value)
        assert message.index("rank 1 of 2 failed") < message.index("rank 0 of 2")
        assert "ValueError: this rank's own words" in message and "about to fail" in message
        with pytest.raises(RankError, match="rank 1 of 2 failed.*\n.*died with exit code 7"):
            pool.run(leave_on, rank=1)
        with pytest.raises(RankError, match="rank 0 of 2 had not answered in time") as raised:
            pool.run(sleep_on, rank=0, timeout=1.0)
        assert "in sleep_on" in str(raised.value)
        assert "rank 1" not in str(raised.value)
        assert pool.run(sum_of, scale=1.0)[1][:3] == (3.0, 1, 2)
    finally:
        pool.close()


def test_functions_that_workers_cannot_import_are_refused(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="not a function at module level"):
        ranks.run(lambda: None)
    with pytest.raises(ValueError, match=r"world_size 9 is not within 1\.\.4"):
        ranks.run(draw, world_size=9)
