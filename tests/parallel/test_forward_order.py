"""The order of a forward-only pass ends even where every send waits for its receive, as on NCCL."""

import pytest

from megafp8.config.layout import Layout
from megafp8.parallel.pipeline import forward_order


def layout(pp: int, vp: int, schedule: str) -> Layout:
    return Layout(1, {"pp": pp}, vp, schedule=schedule)


def operations(grid: Layout, rank: int, count: int) -> list[tuple[str, int, tuple[int, int]]]:
    """(send or receive, peer, (stage, micro-batch) of the message) of a rank, in order."""
    owner = {i: r for r in range(grid.pp) for i in grid.stage_indices(r)}
    found = []
    for index, number in forward_order(grid.stage_indices(rank), grid.pp, grid.schedule, count):
        if index > 0 and owner[index - 1] != rank:
            found.append(("receive", owner[index - 1], (index - 1, number)))
        if index < grid.num_stages - 1 and owner[index + 1] != rank:
            found.append(("send", owner[index + 1], (index, number)))
    return found


def runs_to_the_end(queues: list[list[tuple[str, int, tuple[int, int]]]]) -> bool:
    """Match the heads of all ranks' queues until nothing moves: rendezvous without any buffer."""
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            if queue and queue[0][0] == "send":
                _, peer, message = queue[0]
                if queues[peer] and queues[peer][0] == ("receive", rank, message):
                    queue.pop(0)
                    queues[peer].pop(0)
                    moved = True
    return not any(queues)


CASES = [
    *((pp, 1, "1f1b", n) for pp in (2, 4) for n in (1, 4, 9)),
    *((pp, 2, "zbv", n) for pp in (2, 3, 4) for n in (1, 4, 9)),
    *((pp, vp, "interleaved", n) for pp in (2, 3, 4) for vp in (2, 3) for n in (1, 2, 4, 9)),
]


@pytest.mark.parametrize("pp, vp, schedule, count", CASES)
def test_no_circle_of_waiting(pp: int, vp: int, schedule: str, count: int) -> None:
    grid = layout(pp, vp, schedule)
    assert runs_to_the_end([operations(grid, rank, count) for rank in range(pp)])


def test_the_matcher_sees_a_circle() -> None:
    """Chunk by chunk over all micro-batches, the interleaved schedule does not end."""
    grid = layout(2, 2, "interleaved")
    queues = []
    for rank in range(2):
        order = [(i, n) for i in grid.stage_indices(rank) for n in range(4)]
        queue = []
        for index, number in order:
            if index > 0:
                queue.append(("receive", 1 - rank, (index - 1, number)))
            if index < 3:
                queue.append(("send", 1 - rank, (index, number)))
        queues.append(queue)
    assert not runs_to_the_end(queues)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_every_micro_batch_once_per_stage(schedule: str) -> None:
    grid = layout(4, 1 if schedule == "1f1b" else 2, schedule)
    for rank in range(4):
        order = forward_order(grid.stage_indices(rank), 4, schedule, 7)
        wanted = {(i, n) for i in grid.stage_indices(rank) for n in range(7)}
        assert len(order) == len(wanted) and set(order) == wanted
