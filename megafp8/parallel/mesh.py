"""The grid of ranks: axes pp, replicate, fsdp, tp (tp fastest), one DeviceMesh and its groups."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

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
        stage_mesh: (replicate, fsdp, tp), for tensors of which each rank of a stage has its own.
        tp, pp, all: groups of the axes, and the world.
        stage: replicate x fsdp x tp, the ranks that hold the same pipeline stages.
        loss: pp x replicate x fsdp, the ranks with this rank's tp coordinate.
        tied: first and last pipeline rank at this rank's dp and tp place (size 1 elsewhere).
        pp_rank, tp_rank, replica: coordinates.
        dp_rank: place among all data-parallel ranks, replica x fsdp.
    """

    layout: Layout
    world: World
    traffic: Traffic
    tp_mesh: DeviceMesh
    fsdp_mesh: DeviceMesh
    stage_mesh: DeviceMesh
    tp: CommGroup
    pp: CommGroup
    stage: CommGroup
    loss: CommGroup
    all: CommGroup
    tied: CommGroup
    pp_rank: int
    dp_rank: int
    tp_rank: int
    replica: int


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
    """Creates each distinct set of rank lists once: every extra NCCL communicator costs memory.

    DeviceMesh would make its groups with torch's default timeout (30 minutes on gloo, whatever the
    world's is), so they are made here and handed to it.
    """

    def __init__(self, world: World, traffic: Traffic) -> None:
        self.world, self.traffic = world, traffic
        everyone = [list(range(world.size))]
        self.known: dict[str, dist.ProcessGroup | None] = {str(everyone): dist.group.WORLD}

    def process_group(self, lists: list[list[int]]) -> dist.ProcessGroup | None:
        """The group of `lists` that holds this rank, None if none does; a call on all ranks."""
        key = str(lists)
        if key not in self.known:
            mine = None
            for ranks in lists:
                made = dist.new_group(ranks, timeout=self.world.timeout)
                if self.world.rank in ranks:
                    assert isinstance(made, dist.ProcessGroup)
                    mine = made
            self.known[key] = mine
        return self.known[key]

    def get(self, lists: list[list[int]]) -> CommGroup:
        """As `process_group`, counted; groups of one rank need no process group."""
        if max(len(ranks) for ranks in lists) == 1:
            return CommGroup(None, self.traffic)
        return CommGroup(self.process_group(lists), self.traffic)


def build_mesh(layout: Layout, world: World) -> Mesh:
    """Build the grid; a collective call on all ranks of the world."""
    assert layout.world_size == world.size
    sizes = (layout.pp, layout.replicate, layout.fsdp, layout.tp)
    traffic = Traffic()
    cache = _GroupCache(world, traffic)
    axis_groups = [cache.process_group(_groups(layout, {axis})) for axis in AXES]
    device_mesh = DeviceMesh.from_group(
        [group for group in axis_groups if group is not None],
        world.device.type,
        mesh=torch.arange(world.size, dtype=torch.int).view(sizes),
        mesh_dim_names=AXES,
    )
    ends = [[ranks[0], ranks[-1]] if len(ranks) > 1 else ranks for ranks in _groups(layout, {"pp"})]
    place = layout.coordinates(world.rank)
    hybrid = layout.replicate > 1
    return Mesh(
        layout=layout,
        world=world,
        traffic=traffic,
        tp_mesh=device_mesh["tp"],
        fsdp_mesh=device_mesh["replicate", "fsdp"] if hybrid else device_mesh["fsdp"],
        stage_mesh=device_mesh["replicate", "fsdp", "tp"],
        tp=CommGroup(axis_groups[AXES.index("tp")], traffic),
        pp=CommGroup(axis_groups[AXES.index("pp")], traffic),
        stage=cache.get(_groups(layout, {"replicate", "fsdp", "tp"})),
        loss=cache.get(_groups(layout, {"pp", "replicate", "fsdp"})),
        all=cache.get([list(range(world.size))]),
        tied=cache.get(ends),
        pp_rank=place.pp_rank,
        dp_rank=place.replica * layout.fsdp + place.shard,
        tp_rank=place.tp_rank,
        replica=place.replica,
    )
