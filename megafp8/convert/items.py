"""What a conversion writes, whatever the format: each tensor made when its turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from megafp8.convert.routes import Described, Route
from megafp8.convert.view import Checksums, ModelView
from megafp8.errors import CheckpointError


@dataclass(frozen=True)
class Item:
    """What one parameter becomes in the files.

    Attributes:
        entries: name -> shape and dtype.
        produce: makes the tensors, in the order of `entries`.
    """

    entries: dict[str, Described]
    produce: Callable[[], Sequence[Tensor]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(entry.nbytes for entry in self.entries.values())

    def write(self, put: Callable[[str, Tensor], None]) -> None:
        """Make the tensors and give each away with its name; nothing of them is kept."""
        for (name, entry), tensor in zip(self.entries.items(), self.produce(), strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (entry.shape, entry.dtype), name
            put(name, tensor)


def as_they_are(values: Mapping[str, Tensor]) -> list[Item]:
    """Items of tensors that are in memory, by name."""
    return [
        Item({name: Described(tuple(value.shape), value.dtype)}, lambda value=value: [value])
        for name, value in values.items()
    ]


def nbytes(items: Iterable[Item]) -> int:
    """Bytes of all items in the files."""
    return sum(item.nbytes for item in items)


@dataclass
class Target:
    """A folder in the making: how values are cast for it, and what was put down.

    Attributes:
        view: the model.
        folder: new and empty.
        final: the folder's later name.
        dtype: of the weights.
        exact: refuse values that `dtype` cannot hold.
        what: the format in words.
        tensors: in the files.
        bytes: in the files.
        notes: for the report.
        checksums: of the values that were written.
    """

    view: ModelView
    folder: Path
    final: Path
    dtype: torch.dtype
    exact: bool
    what: str = ""
    tensors: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    checksums: Checksums = field(init=False)

    def __post_init__(self) -> None:
        self.checksums = Checksums(self.view.shape)

    def items(self, routes: Iterable[Route]) -> list[Item]:
        """Every parameter under the names of its route."""
        return [self._item(route) for route in routes]

    def _item(self, route: Route) -> Item:
        pairs = zip(route.theirs, route.shapes, strict=True)
        entries = {name: Described(shape, self.dtype) for name, shape in pairs}

        def produce() -> list[Tensor]:
            ours = self._cast(route.ours)
            self.checksums.add(route.ours, ours)
            return route.split(ours)

        return Item(entries, produce)

    def _cast(self, name: str) -> Tensor:
        """One parameter in the target's dtype, if it holds all of its values."""
        before, what = self.view.read(name), f"{self.view.path}: {name} holds"
        bad = before.numel() - int(before.isfinite().sum())
        if bad:
            raise CheckpointError(f"{what} {bad} values that are not finite: no weights of a model")
        after = before.to(self.dtype)
        if self.exact and not torch.equal(after.to(before.dtype), before):
            raise CheckpointError(f"{what} values that {self.dtype} does not; give --dtype")
        if not after.isfinite().all():
            raise CheckpointError(f"{what} values beyond the range of {self.dtype}")
        return after


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; yields what tells it of progress."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
