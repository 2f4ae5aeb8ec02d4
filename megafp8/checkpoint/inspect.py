"""What a checkpoint holds and whether it is whole, as rows for tables. Reads a tensor at a time."""

import math
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.checkpoint.files import reading
from megafp8.checkpoint.find import file_problem, find_checkpoint, foreign_files, read_record
from megafp8.checkpoint.kinds import found_instead
from megafp8.checkpoint.rank_scales import LOCAL_PREFIX, SHARED_PREFIX
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.record import CheckpointRecord, FileEntry, TensorEntry
from megafp8.checkpoint.scale_checks import scale_problems
from megafp8.checkpoint.tensors import WORKERS, bytes_of, bytes_view, in_order
from megafp8.checkpoint.values import flaw
from megafp8.errors import CheckpointError

# Elements that are compared at a time, so that a large tensor needs no second copy in fp64.
_BLOCK = 2**20


class FileState(NamedTuple):
    """A file of a checkpoint: its entry in the record, and what is wrong with it, if anything."""

    name: str
    entry: FileEntry
    problem: str | None


class Share(NamedTuple):
    """How many tensors and elements of one kind and dtype there are, and how many bytes."""

    kind: str
    dtype: str
    tensors: int
    elements: int
    size: int


class ScaleRow(NamedTuple):
    """The state of one FP8 tensor: scale [dp, tp], or [1, 1] where ranks share it; amaxes.

    `newest` and `largest` of the window are the largest over ranks, 0 with an empty window;
    `filled` are the entries of the rank with most.
    """

    module: str
    role: str
    scale: Tensor
    newest: float
    largest: float
    filled: int


@dataclass(frozen=True)
class Inspection:
    """A checkpoint that was looked at.

    Attributes:
        directory: where it is.
        record: its `megafp8.json`.
        files: all files, with what is wrong.
        shares: its tensors by kind and dtype, largest first.
        scales: FP8 scale state; as the next two, empty where a file is damaged.
        flaws: one sentence for each tensor with values that training cannot go on from.
        scale_problems: one sentence for each FP8 tensor whose scale state is mis-shaped, missing or
            does not fit its window.
    """

    directory: Path
    record: CheckpointRecord
    files: list[FileState]
    shares: list[Share]
    scales: list[ScaleRow] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    scale_problems: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """One sentence for each damaged file, and for each FP8 tensor with damaged scale state."""
        files = [f"{self.directory / f.name} {f.problem}" for f in self.files if f.problem]
        return files + self.scale_problems


class TensorChange(NamedTuple):
    """How a tensor differs between two checkpoints: added, removed, reshaped or changed.

    `elements` have other bits and differ by up to `largest`, NaN if one side has a NaN there;
    `drift` is log2(new / old) of a scale that ranks share.
    """

    name: str
    change: str
    detail: str = ""
    elements: int = 0
    largest: float = 0.0
    drift: float | None = None


def inspect_checkpoint(load: Path) -> Inspection:
    """Look at a checkpoint and compare all its files with their checksums.

    Args:
        load: a folder of checkpoints, or one of them.

    Raises:
        CheckpointError: there is none, it is partial, or its record cannot be read. Damaged shards
            are told in the result.
    """
    directory = locate(load)
    with reading(directory):
        return _inspect(directory)


def locate(load: Path) -> Path:
    """Find a checkpoint that can be looked at, and no more: nothing but its record is read.

    Args:
        load: a folder of checkpoints, or one of them.

    Raises:
        CheckpointError: there is none, it is partial, or its record cannot be read.
    """
    directory = find_checkpoint(load)
    if directory is None:
        raise CheckpointError(f"{load} holds no checkpoint{found_instead(load)}")
    read_record(directory)
    return directory


def _inspect(directory: Path) -> Inspection:
    record = read_record(directory)

    def look_at(item: tuple[str, FileEntry]) -> FileState:
        return FileState(*item, file_problem(directory, *item))

    with ThreadPoolExecutor(WORKERS) as pool:
        files = list(pool.map(look_at, record.files.items()))
    for name in foreign_files(directory, record):
        entry = FileEntry((directory / name).lstat().st_size, "?")
        files.append(FileState(name, entry, "is no file of this checkpoint"))
    if any(file.problem for file in files):
        return Inspection(directory, record, files, shares_of(record))
    reader = TensorReader(directory, record)

    def flaw_of(name: str) -> str | None:
        found = flaw(name, reader.read(name))
        return None if found is None else f"{name} {found}"

    names = ((name, bytes_of(reader.entry(name))) for name in reader.names)
    flaws = [found for found in in_order(names, flaw_of) if found is not None]
    scales = list(_scale_rows(reader))
    wrong = scale_problems(reader)
    return Inspection(directory, record, files, shares_of(record), scales, flaws, wrong)


def kind_of(name: str) -> str:
    """Return what a tensor of this name is, in words."""
    if name.startswith("optimizer."):
        return "optimizer"
    if name.startswith((SHARED_PREFIX, LOCAL_PREFIX)):
        return "FP8 scale state"
    known = ("embedding.", "decoder.", "output_layer.")
    return "weights" if name.startswith(known) else "other"


def shares_of(record: CheckpointRecord) -> list[Share]:
    """Return a checkpoint's tensors by kind and dtype, largest first."""
    groups: dict[tuple[str, str], list[TensorEntry]] = defaultdict(list)
    for name, entry in record.tensors.items():
        groups[kind_of(name), entry.dtype].append(entry)
    shares = [
        Share(*key, len(group), sum(math.prod(e.shape) for e in group), sum(map(bytes_of, group)))
        for key, group in groups.items()
    ]
    return sorted(shares, key=lambda share: -share.size)


def _scale_rows(reader: TensorReader) -> Iterator[ScaleRow]:
    for name in reader.names:
        stem, _, kind = name.rpartition(".")
        prefix, _, rest = stem.partition(".")
        if f"{prefix}." not in (SHARED_PREFIX, LOCAL_PREFIX) or kind != "scale":
            continue
        module, _, role = rest.rpartition(".")
        scale, window = reader.read(name), torch.zeros(1)
        if f"{stem}.amax_history" in reader.record.tensors:
            window = reader.read(f"{stem}.amax_history")
        if not scale.numel() or not window.numel() or not window.dim():
            continue  # no row, and a problem
        rows = window.reshape(-1, window.shape[-1])
        amaxes = float(rows[:, -1].max()), float(rows.max()), int((rows != 0).sum(-1).max())
        yield ScaleRow(module, role, scale if scale.dim() else scale.reshape(1, 1), *amaxes)


def compare_checkpoints(old: Path, new: Path) -> Iterator[TensorChange]:
    """Yield the tensors in which two whole checkpoints differ, by name; equal ones are left out.

    Args:
        old: a checkpoint's directory.
        new: another's.
    """
    one, other = TensorReader(old, read_record(old)), TensorReader(new, read_record(new))
    common = []
    for name in sorted({*one.names, *other.names}):
        if name not in other.record.tensors:
            yield TensorChange(name, "removed", _describe(one.entry(name)))
        elif name not in one.record.tensors:
            yield TensorChange(name, "added", _describe(other.entry(name)))
        elif one.entry(name) != other.entry(name):
            detail = f"{_describe(one.entry(name))} -> {_describe(other.entry(name))}"
            yield TensorChange(name, "reshaped", detail)
        else:
            common.append((name, 2 * bytes_of(one.entry(name))))

    def compare(name: str) -> TensorChange | None:
        return _difference(name, one.read(name), other.read(name))

    yield from (change for change in in_order(common, compare) if change is not None)


def _describe(entry: TensorEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


def _difference(name: str, old: Tensor, new: Tensor) -> TensorChange | None:
    a, b = old.reshape(-1), new.reshape(-1)
    elements, largest = 0, 0.0
    for left, right in zip(a.split(_BLOCK), b.split(_BLOCK), strict=True):
        changed = (bytes_view(left) != bytes_view(right)).view(-1, old.element_size()).any(-1)
        if changed.any():
            elements += int(changed.sum())
            wide = torch.complex128 if old.is_complex() else torch.float64
            gaps = left[changed].to(wide) - right[changed].to(wide)
            gaps = (torch.view_as_real(gaps) if old.is_complex() else gaps).abs()
            largest = float(torch.stack((gaps.max(), gaps.new_tensor(largest))).max())
    if not elements:
        return None
    drift = None
    if name.startswith(SHARED_PREFIX) and name.endswith(".scale"):
        ratio = float((new.double() / old.double()).reshape(-1)[0])
        # What is no scale (0, negative, NaN) has no logarithm.
        drift = math.log2(ratio) if 0 < ratio < math.inf else math.nan
    return TensorChange(name, "changed", "", elements, largest, drift)
