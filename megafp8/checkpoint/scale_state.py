"""FP8 scale state between registries and a checkpoint: shared by ranks or each rank's own.

With `--fp8-reduce-amax` (the default) ranks of a stage agree on every scale: one copy is stored,
`fp8.*`. Without it each keeps its own, stored together as `fp8_local.*` (see `rank_scales`). Either
form loads into either kind of run, at any layout and with a window of another length. What a run
takes over are windows: scales are chosen anew from them by its own formats and rule.
"""

import math
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from megafp8.checkpoint.files import RECORD_NAME
from megafp8.checkpoint.find import advice
from megafp8.checkpoint.rank_scales import (
    LOCAL_PREFIX,
    SHARED_PREFIX,
    describe_ranks,
    move_ranks,
)
from megafp8.checkpoint.record import CheckpointRecord
from megafp8.config.axes import scale_axes
from megafp8.errors import CheckpointError
from megafp8.log import get_logger
from megafp8.numerics import Recipe, ScaleRegistry
from megafp8.parallel.mesh import Mesh

log = get_logger(__name__)

# Values of one FP8 tensor's state: a window of thousands on thousands of ranks. More is damage, and
# would be allocated before it is read.
_LARGEST_STATE = 2**28

SCALE_PREFIXES = (SHARED_PREFIX, LOCAL_PREFIX)


def scale_tensors(registry: ScaleRegistry | None, mesh: Mesh, reduced: bool) -> dict[str, Tensor]:
    """Return this rank's scale state under its names in a checkpoint; a collective call.

    Args:
        registry: of this rank; None without FP8.
        mesh: of this rank.
        reduced: `--fp8-reduce-amax`.

    Raises:
        CheckpointError: on every rank; ranks that share scales differ in some, which are named.
    """
    if registry is None:
        return {}
    own = registry.tensors()
    if reduced:
        _check_equal(own, mesh)
        return own
    return {_local_name(name): _as_part(value, mesh) for name, value in own.items()}


def _local_name(name: str) -> str:
    return LOCAL_PREFIX + name.removeprefix(SHARED_PREFIX)


def _as_part(value: Tensor, mesh: Mesh) -> DTensor:
    """One rank's tensor [...] as its part of the global [dp, tp, ...]."""
    shape = torch.Size((*mesh.layout.scale_ranks, *value.shape))
    dims = {axis: dim for dim in (0, 1) for axis in scale_axes(dim)}
    names = mesh.stage_mesh.mesh_dim_names or ()
    return DTensor.from_local(
        value[None, None],
        mesh.stage_mesh,
        [Shard(dims[axis]) if axis in dims else Replicate() for axis in names],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _check_equal(own: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Compare checksums over the ranks of each stage; names the tensors that differ."""
    names = list(own)
    sums = [zlib.crc32(own[name].detach().cpu().numpy().tobytes()) for name in names]
    digests = torch.tensor(sums, dtype=torch.int64, device=mesh.world.device)
    # Largest and, through the sign, smallest: both are mine only if all are equal.
    extremes = torch.cat((digests, -digests))
    if mesh.stage.size > 1 and names:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.stage.process_group)
    highest, lowest = extremes.chunk(2)
    different = [names[i] for i in (highest != -lowest).nonzero().flatten().tolist()]
    everyone: list[list[str]] = [[] for _ in range(mesh.world.size)]
    dist.all_gather_object(everyone, different)
    found = sorted({name for part in everyone for name in part})
    if found:
        raise CheckpointError(
            f"scale state differs between ranks that share it, in {len(found)} tensors: "
            f"{', '.join(found[:6])}; nothing is saved (--no-fp8-reduce-amax is for ranks with "
            "scales of their own)"
        )


def scale_targets(
    registry: ScaleRegistry | None,
    record: CheckpointRecord,
    path: Path,
    mesh: Mesh,
    reduced: bool,
) -> dict[str, Tensor]:
    """Return tensors to load a checkpoint's scale state of the registry's entries into.

    Names and shapes are the checkpoint's, whether its ranks shared their scales or not.

    Args:
        registry: of this rank; None without FP8.
        record: of the checkpoint.
        path: of the checkpoint, for messages.
        mesh: of this rank.
        reduced: `--fp8-reduce-amax`.

    Raises:
        CheckpointError: a shape in the record is no scale's or window's.
    """
    if registry is None:
        return {}
    targets: dict[str, Tensor] = {}
    for name, value in registry.tensors().items():
        local = record.tensors.get(_local_name(name))
        _check_shapes(name, record, path)
        if local is None:
            shared = record.tensors.get(name)
            shape = tuple(value.shape) if shared is None else shared.shape
            targets[name] = torch.zeros(shape, dtype=torch.float32)
        elif not reduced and local.shape[:2] == mesh.layout.scale_ranks:
            # The same ranks: each reads its own part alone.
            part = torch.zeros(local.shape[2:], dtype=torch.float32, device=mesh.world.device)
            targets[_local_name(name)] = _as_part(part, mesh)
        else:
            targets[_local_name(name)] = torch.zeros(local.shape, dtype=torch.float32)
    return targets


def _check_shapes(name: str, record: CheckpointRecord, path: Path) -> None:
    """Refuse what is no scale [] or window [H], with [dp, tp] in front where ranks differ."""
    for key, leading in ((name, 0), (_local_name(name), 2)):
        entry = record.tensors.get(key)
        dims = leading + name.endswith(".amax_history")
        if entry is None:
            continue
        fits = len(entry.shape) == dims and 0 < math.prod(entry.shape) <= _LARGEST_STATE
        if not fits:
            expected = ["dp", "tp"][:leading] + ["H"][: dims - leading]
            raise CheckpointError(
                f"{path / RECORD_NAME} is damaged: {key} has shape {list(entry.shape)}, expected "
                f"[{', '.join(expected)}]{advice(path)}"
            )


def take_scales(
    registry: ScaleRegistry | None,
    targets: Mapping[str, Tensor],
    missing: Collection[str],
    path: Path,
    mesh: Mesh,
    reduced: bool,
    before: Recipe | None = None,
) -> str | None:
    """Hand loaded scale state to the registry; what was missing starts anew, with one warning.

    Args:
        registry: of this rank; None without FP8.
        targets: from `scale_targets`, filled.
        missing: names that the checkpoint lacks.
        path: of the checkpoint, for messages.
        mesh: of this rank.
        reduced: `--fp8-reduce-amax`.
        before: recipe of the run that saved; None for the registry's own.

    Returns:
        What was done to scales that differ between ranks, in words; None where none do.
    """
    if registry is None:
        return None
    state: dict[str, Tensor] = {}
    rule = None
    for name, tensor in targets.items():
        if name in missing:
            continue
        if name.startswith(LOCAL_PREFIX):
            rule = describe_ranks(tuple(tensor.shape[:2]), mesh.layout, reduced)
            name = SHARED_PREFIX + name.removeprefix(LOCAL_PREFIX)
            tensor = _own(name, tensor, mesh, reduced)
        elif not reduced:
            rule = "one scale for all ranks, copied to each"
        state[name] = tensor
    fresh = registry.load(state)
    moved = registry.rescale(before)
    if rule is not None:
        log.info("%s: scale state of ranks: %s", path, rule)
    if moved and rule is None and before == registry.recipe:
        log.warning("%s: %d FP8 scales did not fit their windows: chosen anew", path, moved)
    elif moved:
        log.info("%s: %d FP8 scales are chosen anew, by this run's formats and rule", path, moved)
    if fresh:
        masters = registry.recipe.weight_amax == "updated"
        log.warning(
            "%s holds no scale state for %d of this rank's %d FP8 tensors; they start with scale 1 "
            "and an empty history%s",
            path,
            fresh,
            len(registry),
            " (weights with the scale of their masters)" if masters else "",
        )
    return rule


def _own(name: str, tensor: Tensor, mesh: Mesh, reduced: bool) -> Tensor:
    """Return what this rank takes from [dp, tp, ...] of the ranks that saved."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()[0, 0]
    if reduced:
        return move_ranks(name, tensor, 1, 1)[0, 0]
    moved = move_ranks(name, tensor, *mesh.layout.scale_ranks)
    return moved[mesh.layout.scale_place(mesh.place)]
