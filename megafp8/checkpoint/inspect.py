"""What a checkpoint holds and whether it is whole, as rows for tables. Reads a tensor at a time."""

import math
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint.files import crc32_of, reading
from megafp8.checkpoint.find import find_checkpoint, foreign_files, read_record, size_problem
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


@dataclass(frozen=True)
class FileState:
    """A file of a checkpoint: its entry in the record, and what is wrong with it, if anything."""

    name: str
    entry: FileEntry
    problem: str | None


@dataclass(frozen=True)
class Share:
    """Tensors of one kind and dtype.

    Attributes:
        kind: weights, optimizer, FP8 scale state or other.
        dtype: torch's name.
        tensors, elements, size: how many, and bytes.
    """

    kind: str
    dtype: str
    tensors: int
    elements: int
    size: int


@dataclass(frozen=True)
class ScaleRow:
    """The state of one FP8 tensor.

    Attributes:
        module, role: whose it is.
        scale: [dp, tp], or [1, 1] where ranks share it.
        newest: the newest amax, largest over ranks; 0 with an empty window.
        largest: the largest amax of the window, over ranks.
        filled: entries of the window, of the rank with most.
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
        shares: its tensors by kind and dtype.
        scales: FP8 scale state; empty where a file is damaged.
        flaws: one sentence for each tensor with values that training cannot go on from; empty
            where a file is damaged.
        scale_problems: one sentence for each FP8 tensor whose scale state is mis-shaped, missing or
            does not fit its window; empty where a file is damaged.
    """

    directory: Path
    record: CheckpointRecord
    files: list[FileState]
    shares: list[Share]
    scales: list[ScaleRow]
    flaws: list[str] = field(default_factory=list)
    scale_problems: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """One sentence for each damaged file, and for each FP8 tensor with damaged scale state."""
        files = [f"{self.directory / f.name} {f.problem}" for f in self.files if f.problem]
        return files + self.scale_problems


@dataclass(frozen=True)
class TensorChange:
    """How a tensor differs between two checkpoints.

    Attributes:
        name: canonical name.
        change: added, removed, reshaped (or of another dtype) or changed.
        detail: shapes and dtypes where they differ.
        elements: how many elements have other bits.
        largest: the largest absolute difference; NaN if one side has a NaN where they differ.
        drift: log2(new / old) of a scale that ranks share; None for other tensors.
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
    with ThreadPoolExecutor(WORKERS) as pool:
        files = list(pool.map(lambda item: _file_state(directory, *item), record.files.items()))
    files += [
        FileState(
            name,
            FileEntry((directory / name).lstat().st_size, "?"),
            "is no file of this checkpoint",
        )
        for name in foreign_files(directory, record)
    ]
    good = all(file.problem is None for file in files)
    if not good:
        return Inspection(directory, record, files, shares_of(record), [])
    reader = TensorReader(directory, record)
    scales, flaws = list(_scale_rows(reader)), list(_flaws(reader))
    wrong = scale_problems(reader)
    return Inspection(directory, record, files, shares_of(record), scales, flaws, wrong)


def _flaws(reader: TensorReader) -> Iterator[str]:
    def look(name: str) -> str | None:
        found = flaw(name, reader.read(name))
        return None if found is None else f"{name} {found}"

    names = ((name, bytes_of(reader.entry(name))) for name in reader.names)
    yield from (found for found in in_order(names, look) if found is not None)


def _file_state(directory: Path, name: str, entry: FileEntry) -> FileState:
    path = directory / name
    problem = size_problem(path, entry.size)
    try:
        if problem is None and (found := crc32_of(path)) != entry.crc32:
            problem = f"is damaged: crc32 {found}, expected {entry.crc32}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    return FileState(name, entry, problem)


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
        Share(
            kind,
            dtype,
            len(entries),
            sum(math.prod(entry.shape) for entry in entries),
            sum(bytes_of(entry) for entry in entries),
        )
        for (kind, dtype), entries in groups.items()
    ]
    return sorted(shares, key=lambda share: -share.size)


def _scale_rows(reader: TensorReader) -> Iterator[ScaleRow]:
    for name in reader.names:
        if not (name.startswith((SHARED_PREFIX, LOCAL_PREFIX)) and name.endswith(".scale")):
            continue
        prefix = LOCAL_PREFIX if name.startswith(LOCAL_PREFIX) else SHARED_PREFIX
        stem = name.removesuffix(".scale")
        module, _, role = stem.removeprefix(prefix).rpartition(".")
        scale, window = reader.read(name), torch.zeros(1)
        if f"{stem}.amax_history" in reader.record.tensors:
            window = reader.read(f"{stem}.amax_history")
        if not scale.numel() or not window.numel() or not window.dim():
            continue  # no row, and a problem
        rows = window.reshape(-1, window.shape[-1])
        yield ScaleRow(
            module,
            role,
            scale if scale.dim() else scale.reshape(1, 1),
            float(rows[:, -1].max()),
            float(rows.max()),
            int((rows != 0).sum(-1).max()),
        )


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


def _exact(values: Tensor) -> Tensor:
    """Return values as fp64; complex ones by their real and imaginary parts."""
    return (torch.view_as_real(values) if values.is_complex() else values).double()


def _describe(entry: TensorEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)}"


def _difference(name: str, old: Tensor, new: Tensor) -> TensorChange | None:
    a, b = old.contiguous().view(-1), new.contiguous().view(-1)
    width = old.element_size()
    elements, largest = 0, 0.0
    for start in range(0, a.numel(), _BLOCK):
        left, right = a[start : start + _BLOCK], b[start : start + _BLOCK]
        changed = bytes_view(left) != bytes_view(right)
        if not changed.any():
            continue
        bits = changed.reshape(-1, width).any(-1)
        elements += int(bits.sum())
        gap = (_exact(left[bits]) - _exact(right[bits])).abs().max().item()
        largest = gap if math.isnan(gap) else max(largest, gap)
    if not elements:
        return None
    drift = None
    if name.startswith(SHARED_PREFIX) and name.endswith(".scale"):
        ratio = float((new.double() / old.double()).reshape(-1)[0])
        # What is no scale (0, negative, NaN) has no logarithm.
        drift = math.log2(ratio) if 0 < ratio < math.inf else math.nan
    return TensorChange(name, "changed", "", elements, largest, drift)
