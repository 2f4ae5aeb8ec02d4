"""The grid of ranks: axes pp, replicate, fsdp, tp (tp fastest), one DeviceMesh and its groups."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafp8.config import Layout
from megafp8.parallel.collectives import CommGroup
from megafp8.parallel.startup import World
from megafp8.parallel.traffic import Traffic

AXES = ("pp", "replicate", "fsdp", "tp")


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the grid and every group it talks to.

    Attributes:
        layout: degrees of parallelism.
        world: this process.
        tp_mesh: 1-D mesh of the tensor-parallel ranks (parameters are DTensors on it).
        fsdp_mesh: mesh for `fully_shard`: (fsdp) or (replicate, fsdp) for HSDP.
        tp, dp, stage, pp, all: groups; dp = replicate x fsdp, stage = dp x tp (the ranks that
            hold the same pipeline stages), all = the world.
        model: pp x fsdp x tp, the ranks that together hold one copy of the model.
        loss: pp x dp, the ranks with this rank's tp coordinate.
        tied: first and last pipeline rank at this rank's dp and tp place (size 1 elsewhere).
    """

    layout: Layout
    world: World
    traffic: Traffic
    tp_mesh: DeviceMesh
    fsdp_mesh: DeviceMesh
    tp: CommGroup
    dp: CommGroup
    pp: CommGroup
    stage: CommGroup
    model: CommGroup
    loss: CommGroup
    all: CommGroup
    tied: CommGroup
    pp_rank: int
    dp_rank: int
    tp_rank: int


def _groups(layout: Layout, vary: set[str]) -> list[list[int]]:
    """Ranks that differ only in the axes of `vary`, one list per value of the others."""
    sizes = {"pp": layout.pp, "replicate": layout.replicate, "fsdp": layout.fsdp, "tp": layout.tp}
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        rest, coordinate = rank, {}
        for axis in reversed(AXES):
            coordinate[axis] = rest % sizes[axis]
            rest //= sizes[axis]
        key = tuple(coordinate[axis] for axis in AXES if axis not in vary)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


class _GroupCache:
    """Creates each distinct set of rank lists once: every extra NCCL communicator costs memory."""

    def __init__(self, layout: Layout, world: World, traffic: Traffic) -> None:
        self.layout, self.world, self.traffic = layout, world, traffic
        self.known: dict[str, CommGroup] = {}

    def adopt(self, lists: list[list[int]], process_group: dist.ProcessGroup) -> CommGroup:
        group = CommGroup(process_group, self.traffic)
        self.known[str(lists)] = group
        return group

    def get(self, lists: list[list[int]]) -> CommGroup:
        """The group of `lists` that holds this rank; a collective call on all ranks."""
        key = str(lists)
        if key not in self.known:
            mine = None
            if max(len(ranks) for ranks in lists) > 1:
                for ranks in lists:
                    if len(ranks) > 1:
                        made = dist.new_group(ranks)
                        mine = made if self.world.rank in ranks else mine
            self.known[key] = CommGroup(mine, self.traffic)
        return self.known[key]


def build_mesh(layout: Layout, world: World) -> Mesh:
    """Build the grid; a collective call on all ranks of the world."""
    assert layout.world_size == world.size
    traffic = Traffic()
    sizes = (layout.pp, layout.replicate, layout.fsdp, layout.tp)
    device_mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=AXES)
    cache = _GroupCache(layout, world, traffic)
    everyone = cache.adopt([list(range(world.size))], dist.group.WORLD)
    groups = {}
    for axis in AXES:
        groups[axis] = cache.adopt(_groups(layout, {axis}), device_mesh.get_group(axis))
    ends = [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in _groups(layout, {"pp"})]
    pp_rank, replicate, fsdp, tp_rank = (device_mesh.get_local_rank(axis) for axis in AXES)
    hybrid = layout.replicate > 1
    return Mesh(
        layout=layout,
        world=world,
        traffic=traffic,
        tp_mesh=device_mesh["tp"],
        fsdp_mesh=device_mesh["replicate", "fsdp"] if hybrid else device_mesh["fsdp"],
        tp=groups["tp"],
        pp=groups["pp"],
        dp=cache.get(_groups(layout, {"replicate", "fsdp"})),
        stage=cache.get(_groups(layout, {"replicate", "fsdp", "tp"})),
        model=cache.get(_groups(layout, {"pp", "fsdp", "tp"})),
        loss=cache.get(_groups(layout, {"pp", "replicate", "fsdp"})),
        all=everyone,
        tied=cache.get(ends),
        pp_rank=pp_rank,
        dp_rank=replicate * layout.fsdp + fsdp,
        tp_rank=tp_rank,
    )
