"""Reading a checkpoint: at any layout, all tensors or an error that names them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from megafp8.checkpoint.agree import on_all_ranks, rank_and_size
from megafp8.checkpoint.files import METADATA_NAME, RECORD_NAME, crc32_of, reading
from megafp8.checkpoint.find import advice, read_record, verify_file, verify_files
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.record import FileEntry
from megafp8.errors import CheckpointError
from megafp8.log import get_logger

_logger = get_logger(__name__)

# A renamed prefix of a large model touches thousands of names; a line of all of them helps nobody.
_MAX_NAMES = 100


@dataclass(frozen=True)
class _Inspection:
    """What one rank found out before any tensor is touched; gathered on all ranks.

    Attributes:
        checkpoint: Directory and the checksum of its record: all ranks must see the same one.
        wanted: Names that this rank asks for.
        mismatches: One sentence per tensor of another shape or dtype.
        recut: Names whose part on this rank is not one of the parts that were saved.
        files: Files that this rank will read.
    """

    checkpoint: tuple[str, str]
    wanted: list[str]
    mismatches: list[str]
    recut: list[str]
    files: set[str]


@dataclass(frozen=True)
class LoadReport:
    """What a load did, the same on every rank.

    Attributes:
        loaded: Tensors that were filled.
        remapped: Those of them that are cut otherwise than they were saved.
        absent: Optional names that some rank asked for and the checkpoint lacks, sorted.
        dropped: Optional names of the checkpoint that no rank asked for, sorted.
    """

    loaded: int
    remapped: int
    absent: list[str]
    dropped: list[str]


def load_tensors(
    directory: Path,
    tensors: Mapping[str, Tensor],
    optional: Callable[[str], bool] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    verify: bool = True,
) -> list[str]:
    """`load_with_report`, returning the names that were absent alone."""
    return load_with_report(directory, tensors, optional, group=group, verify=verify).absent


def load_with_report(
    directory: Path,
    tensors: Mapping[str, Tensor],
    optional: Callable[[str], bool] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    verify: bool = True,
) -> LoadReport:
    """Fill tensors in place from a checkpoint; all ranks of `group` call it together.

    The layout may be another than that which saved: each rank reads the parts of its shards.
    Works without a process group (plain tensors, or DTensors of a group of one).

    Args:
        directory: A complete checkpoint, as `find_checkpoint` returns it.
        tensors: Canonical name to tensor or DTensor, allocated; different names on different
            ranks are fine. Values are overwritten exactly, nothing is cast.
        optional: Names for which it is true may be missing from the checkpoint (they are returned
            and left as they are) or be in the checkpoint without being asked for (they are
            dropped, with one log line). All other names must match. It must be the same function
            on all ranks.
        group: Ranks that take part; None for the default group.
        verify: Compare the files' checksums too, each on one rank and while it is read; sizes
            always.

    Returns:
        What was loaded, what was absent and what was left.

    Raises:
        CheckpointError: on every rank; a damaged file (named, with the checkpoint to use instead),
            names missing or unexpected, a tensor of another shape or dtype. Where wrong bytes
            or an unreadable file were found, some of `tensors` have been written and none may be
            used; all else is found before.
    """
    directory = Path(directory).absolute()
    with reading(directory):
        return _load(directory, tensors, optional or (lambda name: False), group, verify)


def _load(
    directory: Path,
    tensors: Mapping[str, Tensor],
    optional: Callable[[str], bool],
    group: dist.ProcessGroup | None,
    verify: bool,
) -> LoadReport:
    step = f"loading {directory}"
    opened: list[tuple[TensorReader, list[ReadItem]]] = []

    def inspect() -> _Inspection:
        reader = _open(directory)
        metadata = reader.metadata
        mismatches = _mismatches(tensors, metadata)
        items: list[ReadItem] = []
        if not mismatches:
            items = create_default_local_load_plan(dict(tensors), metadata, strict=False).items
        opened.append((reader, items))
        return _Inspection(
            checkpoint=(str(directory), crc32_of(directory / RECORD_NAME)),
            wanted=list(tensors),
            mismatches=mismatches,
            recut=_recut(tensors, metadata),
            files=reader.files_of(items),
        )

    inspections = on_all_ranks(step, inspect, group)
    stored = set(opened[0][0].record.tensors)
    absent, dropped = _compare_names(step, inspections, stored, optional)
    if dropped:
        _logger.info(
            "%s: %d stored tensors are not used by this run: %s",
            directory,
            len(dropped),
            _list_names(dropped, 3),
        )
    reader, items = opened[0]
    files = reader.record.files
    shares = _share_files(files, [one.files for one in inspections]) if verify else {}
    rank, _ = rank_and_size(group)

    def read() -> None:
        try:
            with torch.no_grad():
                reader.fill(tensors, items, shares.get(rank, ()))
        except CheckpointError as error:
            raise CheckpointError(f"{error}{advice(directory)}") from error

    on_all_ranks(step, read, group)
    wanted = {name for inspection in inspections for name in inspection.wanted}
    recut = {name for inspection in inspections for name in inspection.recut}
    return LoadReport(len(wanted & stored), len(recut & stored), absent, dropped)


def _open(directory: Path) -> TensorReader:
    record = read_record(directory)
    try:
        verify_files(directory, record, checksums=False)
        # Small, and all that follows depends on it.
        verify_file(directory, record, METADATA_NAME)
        return TensorReader(directory, record)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{advice(directory)}") from error


def _share_files(files: Mapping[str, FileEntry], read_by: list[set[str]]) -> dict[int, list[str]]:
    """Return which files each rank verifies: each one once, by a rank that reads it anyway.

    Args:
        files: All files of the checkpoint.
        read_by: For each rank the files that it reads.
    """
    shares: dict[int, list[str]] = {rank: [] for rank in range(len(read_by))}
    load = dict.fromkeys(shares, 0)
    for name, entry in sorted(files.items(), key=lambda file: (-file[1].size, file[0])):
        if name == METADATA_NAME:
            continue  # every rank has
        readers = [rank for rank in shares if name in read_by[rank]] or list(shares)
        rank = min(readers, key=load.__getitem__)
        shares[rank].append(name)
        load[rank] += entry.size
    return shares


def _mismatches(tensors: Mapping[str, Tensor], metadata: Metadata) -> list[str]:
    sentences = []
    for name, tensor in tensors.items():
        assert not tensor.is_meta, f"{name} is on the meta device and cannot be filled in place"
        saved = metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            continue
        if saved.size != tensor.shape:
            sentences.append(f"{name} has shape {list(saved.size)}, expected {list(tensor.shape)}")
        if saved.properties.dtype != tensor.dtype:
            sentences.append(f"{name} is {saved.properties.dtype}, expected {tensor.dtype}")
    return sentences


def _recut(tensors: Mapping[str, Tensor], metadata: Metadata) -> list[str]:
    names = []
    for name, tensor in tensors.items():
        saved = metadata.state_dict_metadata.get(name)
        if not isinstance(saved, TensorStorageMetadata):
            continue
        parts = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks}
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                continue
            chunks = tensor.__create_chunk_list__()
            mine = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks}
        else:
            mine = {((0,) * tensor.dim(), tuple(tensor.shape))}
        # A rank may hold no row of a tensor; nothing is read for it.
        if not {part for part in mine if 0 not in part[1]} <= parts:
            names.append(name)
    return names


def _compare_names(
    step: str,
    inspections: list[_Inspection],
    stored: set[str],
    optional: Callable[[str], bool],
) -> tuple[list[str], list[str]]:
    """Return the optional names that are absent and those that are dropped; raise on all others.

    Every rank has the same `inspections` and so raises, or not, together with the others.
    """
    checkpoints = {inspection.checkpoint for inspection in inspections}
    if len(checkpoints) > 1:
        seen = ", ".join(f"{path} ({checksum})" for path, checksum in sorted(checkpoints))
        raise CheckpointError(f"{step}: ranks see different checkpoints: {seen}")
    wanted = {name for inspection in inspections for name in inspection.wanted}
    missing, unexpected = sorted(wanted - stored), sorted(stored - wanted)
    problems = []
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        fatal = [name for name in names if not optional(name)]
        if fatal:
            problems.append(f"{len(fatal)} {what}: {_list_names(fatal, _MAX_NAMES)}")
    mismatches = sorted({text for inspection in inspections for text in inspection.mismatches})
    if mismatches:
        problems.append(_list_names(mismatches, _MAX_NAMES))
    if problems:
        raise CheckpointError(
            f"{step}: its tensors are not those of this model: {'; '.join(problems)}"
        )
    return missing, unexpected


def _list_names(names: list[str], limit: int) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
