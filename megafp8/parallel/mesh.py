"""The grid of ranks: one DeviceMesh over the axes of `Layout.grid`, and its groups."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafp8.config import Layout
from megafp8.config.axes import RANK_ORDER, axes_of
from megafp8.config.layout import Place
from megafp8.parallel.collectives import CommGroup
from megafp8.parallel.startup import World
from megafp8.parallel.traffic import Traffic


@dataclass(frozen=True)
class Mesh:
    """This rank's place in the grid and every group it talks to.

    Attributes:
        layout: degrees of parallelism.
        world: this process.
        tp_mesh: 1-D mesh of the tensor-parallel ranks (parameters are DTensors on it).
        fsdp_mesh: mesh for `fully_shard`: (fsdp) or (replicate, fsdp) for HSDP.
        stage_mesh: axes of `stage`, for tensors of which each rank of a stage has its own.
        tp, pp, all: groups of the axes, and the world.
        stage, loss: groups of the axes that the table of axes names.
        tied: first and last pipeline rank at this rank's dp and tp place (size 1 elsewhere).
        place: coordinate on each axis.
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
    place: Place

    @property
    def pp_rank(self) -> int:
        """Coordinate among the pipeline ranks."""
        return self.place["pp"]

    @property
    def tp_rank(self) -> int:
        """Coordinate among the tensor-parallel ranks."""
        return self.place["tp"]

    @property
    def dp_rank(self) -> int:
        """Number among all data-parallel ranks."""
        return self.layout.index(self.place, axes_of("dp"))


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
        # All ranks ask for the same lists in the same order: creating a group is a collective call.
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
        # Uneven lists: where some groups have members, a rank alone still takes part in their
        # creation.
        if max(len(ranks) for ranks in lists) == 1:
            return CommGroup(None, self.traffic)
        return CommGroup(self.process_group(lists), self.traffic)


def build_mesh(layout: Layout, world: World) -> Mesh:
    """Build the grid; a collective call on all ranks of the world."""
    assert layout.world_size == world.size
    traffic = Traffic()
    cache = _GroupCache(world, traffic)
    grid = layout.grid
    along = {axis: cache.process_group(layout.groups([axis])) for axis in grid}
    device_mesh = DeviceMesh.from_group(
        [group for group in along.values() if group is not None],
        world.device.type,
        mesh=torch.arange(world.size, dtype=torch.int).view([layout.size(axis) for axis in grid]),
        mesh_dim_names=grid,
    )
    chains = layout.groups(axes_of("tied"))
    hybrid = layout.replicate > 1
    return Mesh(
        layout=layout,
        world=world,
        traffic=traffic,
        tp_mesh=device_mesh["tp"],
        # Two dims make FSDP2 shard over the second and all-reduce over the first (HSDP).
        fsdp_mesh=device_mesh["replicate", "fsdp"] if hybrid else device_mesh["fsdp"],
        stage_mesh=device_mesh[tuple(axis for axis in axes_of("stage") if axis in grid)],
        tp=CommGroup(along["tp"], traffic),
        pp=CommGroup(along["pp"], traffic),
        stage=cache.get(layout.groups(axes_of("stage"))),
        loss=cache.get(layout.groups(axes_of("loss"))),
        all=cache.get(layout.groups(RANK_ORDER)),
        # Of each chain of stages only the ends hold the tied embedding.
        tied=cache.get([[r[0], r[-1]] if len(r) > 1 else r for r in chains]),
        place=layout.coordinates(world.rank),
    )
