"""Every group of the grid against tables written by hand."""

from typing import Any

import pytest
import torch.distributed as dist

from megafp8.config import Layout
from megafp8.parallel import CommGroup, build_mesh
from tests.model.small import small_config, world

GROUPS = ("tp", "pp", "stage", "loss", "all", "tied")


def members(group: CommGroup) -> list[int]:
    if group.process_group is None:
        return [dist.get_rank()]
    return dist.get_process_group_ranks(group.process_group)


def groups_of_this_rank(**changes: Any) -> dict[str, Any]:
    mesh = build_mesh(small_config(**changes).layout(dist.get_world_size()), world())
    found: dict[str, Any] = {name: members(getattr(mesh, name)) for name in GROUPS}
    for name in GROUPS:
        group = getattr(mesh, name)
        assert group.size == len(found[name])
        assert found[name][group.rank] == dist.get_rank()
        assert group.traffic is mesh.traffic
    found["place"] = (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank, mesh.place["replicate"])
    found["fsdp"] = mesh.fsdp_mesh.mesh.tolist()
    found["tp mesh"] = mesh.tp_mesh.mesh.tolist()
    return found


TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
ALL = [0, 1, 2, 3]
# Layout; then per rank: place (pp, dp, tp, replica), tp, pp, stage, loss, tied, fsdp mesh.
TABLES: list[tuple[dict[str, Any], list[tuple]]] = [
    (
        {**TP2, **PP2},
        [
            ((0, 0, 0, 0), [0, 1], [0, 2], [0, 1], [0, 2], [0, 2], [0]),
            ((0, 0, 1, 0), [0, 1], [1, 3], [0, 1], [1, 3], [1, 3], [1]),
            ((1, 0, 0, 0), [2, 3], [0, 2], [2, 3], [0, 2], [0, 2], [2]),
            ((1, 0, 1, 0), [2, 3], [1, 3], [2, 3], [1, 3], [1, 3], [3]),
        ],
    ),
    (
        TP2,
        [
            ((0, 0, 0, 0), [0, 1], [0], ALL, [0, 2], [0], [0, 2]),
            ((0, 0, 1, 0), [0, 1], [1], ALL, [1, 3], [1], [1, 3]),
            ((0, 1, 0, 0), [2, 3], [2], ALL, [0, 2], [2], [0, 2]),
            ((0, 1, 1, 0), [2, 3], [3], ALL, [1, 3], [3], [1, 3]),
        ],
    ),
    (  # HSDP: two replicas of two shards
        {"fsdp_size": 2},
        [((0, r, 0, r // 2), [r], [r], ALL, ALL, [r], [[0, 1], [2, 3]]) for r in range(4)],
    ),
    (  # four stages: the ends are ranks 0 and 3, those between have no tied partner
        {"pipeline_model_parallel_size": 4, "num_layers": 4},
        [((r, 0, 0, 0), [r], ALL, [r], ALL, [0, 3] if r in (0, 3) else [r], [r]) for r in range(4)],
    ),
    (  # two replicas of each stage
        {**PP2, "fsdp_size": 1},
        [
            ((0, 0, 0, 0), [0], [0, 2], [0, 1], ALL, [0, 2], [[0], [1]]),
            ((0, 1, 0, 1), [1], [1, 3], [0, 1], ALL, [1, 3], [[0], [1]]),
            ((1, 0, 0, 0), [2], [0, 2], [2, 3], ALL, [0, 2], [[2], [3]]),
            ((1, 1, 0, 1), [3], [1, 3], [2, 3], ALL, [1, 3], [[2], [3]]),
        ],
    ),
]


@pytest.mark.parametrize("changes, table", TABLES, ids=lambda value: str(value)[:60])
def test_groups_of_four_ranks(ranks, changes, table):
    answers = ranks.run(groups_of_this_rank, **changes)
    names = ("place", "tp", "pp", "stage", "loss", "tied", "fsdp")
    for rank, (answer, row) in enumerate(zip(answers, table, strict=True)):
        wanted = dict(zip(names, row, strict=True)) | {"all": ALL, "tp mesh": row[1]}
        assert answer == wanted, f"rank {rank}"


def test_a_world_of_one_has_groups_of_one(ranks):
    (answer,) = ranks.run(groups_of_this_rank, world_size=1)
    assert {tuple(answer[name]) for name in GROUPS} == {(0,)}


def layout(**sizes: int) -> Layout:
    return Layout(layers_per_stage=1, sizes=sizes)


def test_groups_of_sixteen_ranks():
    """rank = ((pp * 2 + replica) * 2 + shard) * 2 + tp."""
    grid = layout(tp=2, fsdp=2, replicate=2, pp=2)
    assert grid.groups({"tp"})[:2] == [[0, 1], [2, 3]]
    assert grid.groups({"fsdp"})[:3] == [[0, 2], [1, 3], [4, 6]]
    assert grid.groups({"replicate"})[:3] == [[0, 4], [1, 5], [2, 6]]
    assert grid.groups({"pp"})[:2] == [[0, 8], [1, 9]]
    assert grid.groups({"replicate", "fsdp"}) == [
        [0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15],
    ]  # fmt: skip
    assert grid.groups({"pp", "fsdp", "tp"}) == [
        [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15],
    ]  # fmt: skip
    assert grid.groups({"replicate", "fsdp", "tp"}) == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("vary", [{"tp"}, {"pp"}, {"fsdp", "tp"}, {"pp", "replicate", "fsdp"}])
def test_groups_divide_the_world(vary):
    lists = layout(tp=2, fsdp=3, replicate=2, pp=2).groups(vary)
    assert sorted(rank for ranks in lists for rank in ranks) == list(range(24))
    assert len({len(ranks) for ranks in lists}) == 1


def a_further_axis() -> tuple[Any, ...]:
    """Of a mesh with an axis that no run uses yet: names and groups of this rank."""
    mesh = build_mesh(layout(cp=2, tp=2), world())
    names = mesh.stage_mesh.mesh_dim_names
    return names, members(mesh.tp), members(mesh.stage), members(mesh.loss), mesh.dp_rank


def test_an_axis_of_the_table_is_an_axis_of_the_mesh(ranks):
    for rank, (names, tp, stage, loss, dp_rank) in enumerate(ranks.run(a_further_axis)):
        assert names == ("replicate", "fsdp", "cp", "tp") and dp_rank == 0
        assert tp == [rank // 2 * 2, rank // 2 * 2 + 1] and stage == ALL
        assert loss == [rank % 2, rank % 2 + 2]
