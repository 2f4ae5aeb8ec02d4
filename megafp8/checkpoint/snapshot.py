"""What a rank is going to write, taken at one moment and independent of the live state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from megafp8.checkpoint.record import TensorEntry
from megafp8.checkpoint.tensors import entry_of
from megafp8.checkpoint.writer import Box
from megafp8.errors import CheckpointError


@dataclass(frozen=True)
class Staged:
    """One rank's part of a checkpoint.

    Attributes:
        entries: Canonical name to global shape and dtype.
        parts: Names with the part of each that this rank holds; None for all of it.
        data: The local tensors of the parts: the live ones, or copies in host memory.
    """

    entries: dict[str, TensorEntry]
    parts: list[tuple[str, Box | None]]
    data: dict[MetadataIndex, Tensor]


def stage(tensors: Mapping[str, Tensor], buffers: dict[MetadataIndex, Tensor] | None) -> Staged:
    """Take this rank's part of a state; no collective.

    Args:
        tensors: Canonical name to tensor, as for `save_checkpoint`.
        buffers: Host memory for copies, kept by the caller from one call to the next (allocating
            it costs several times as much as filling it); None to refer to the live tensors.

    Raises:
        CheckpointError: something is no tensor, holds no values, or is a partial sum.
    """
    entries = _describe_tensors(tensors)
    state = dict(tensors)
    items = create_default_local_save_plan(state, is_coordinator=False).items
    data = {item.index: find_state_dict_object(state, item.index) for item in items}
    if buffers is not None:
        data = _copy(data, buffers)
    return Staged(entries, [_part_of(item) for item in items], data)


def _part_of(item: WriteItem) -> tuple[str, Box | None]:
    if item.type == WriteItemType.TENSOR:
        return item.index.fqn, None
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return item.index.fqn, Box(tuple(chunk.offsets), tuple(chunk.sizes))


@torch.no_grad()
def _copy(
    data: Mapping[MetadataIndex, Tensor], buffers: dict[MetadataIndex, Tensor]
) -> dict[MetadataIndex, Tensor]:
    for index in buffers.keys() - data.keys():
        del buffers[index]
    on_device = False
    for index, tensor in data.items():
        buffer = buffers.get(index)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            # Pinned memory lets a copy from the device run at the bus's full speed.
            pinned = tensor.is_cuda
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            buffers[index] = buffer
        on_device = on_device or tensor.is_cuda
        buffer.copy_(tensor.detach(), non_blocking=True)
    if on_device:
        torch.cuda.synchronize()
    return dict(buffers)


def _describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    entries = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"tensor name {name!r} is not a text")
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is {type(tensor).__name__}, expected a tensor")
        if tensor.is_meta:
            raise CheckpointError(f"{name} is on the meta device and holds no values")
        if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
            raise CheckpointError(
                f"{name} is placed as {tensor.placements}: partial sums cannot be stored"
            )
        entries[name] = entry_of(tensor)
    return entries


def merge_entries(described: Sequence[dict[str, TensorEntry]], step: str) -> dict[str, TensorEntry]:
    """Join all ranks' names; DCP would silently take the first rank's shape where they differ.

    Args:
        described: `Staged.entries` by rank.
        step: What is being done, the head of a message.

    Raises:
        CheckpointError: ranks disagree about a tensor, or there is none.
    """
    owners: dict[str, int] = {}
    merged: dict[str, TensorEntry] = {}
    for rank, entries in enumerate(described):
        for name, entry in entries.items():
            first = owners.setdefault(name, rank)
            if merged.setdefault(name, entry) != entry:
                raise CheckpointError(
                    f"{step}: {name} is {merged[name].dtype}{list(merged[name].shape)} on rank"
                    f" {first} and {entry.dtype}{list(entry.shape)} on rank {rank}"
                )
    if not merged:
        raise CheckpointError(f"{step}: no rank holds any tensor")
    return dict(sorted(merged.items()))
