"""An inspection of a checkpoint for a terminal: tables and one chart."""

import math
import re
from collections import Counter
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from megafp8.checkpoint.inspect import Inspection, ScaleRow, TensorChange
from megafp8.checkpoint.values import summary
from megafp8.config.axes import DEGREES

# Eight block heights from U+2581 on, and what stands for them where only ASCII can be shown.
_BLOCKS = "".join(chr(0x2581 + level) for level in range(8))
_ASCII_BLOCKS = "_.-~=+*#"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# A pipe has no width; tables need about this much to keep names whole.
PIPE_WIDTH = 140
_MAX_CHANGES = 200


def console() -> Console:
    """Return a console on standard output, wide enough where that is no terminal."""
    made = Console(highlight=False, markup=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)


def inspection_text(found: Inspection, ascii_only: bool = False) -> RenderableType:
    """Return everything about one checkpoint, the verdict last."""
    parts: list[RenderableType] = [_header(found), _files(found), _shares(found)]
    if found.scales:
        parts += [_scales(found.scales), _chart(found.scales, ascii_only)]
    return Group(*parts, _verdict(found))


def _header(found: Inspection) -> Table:
    record, layout = found.record, found.record.layout
    sizes = " x ".join(f"{name} {layout[name]}" for name in DEGREES if name in layout)
    ranks = f"{layout.get('world_size', '?')} ranks: {sizes or 'unknown'}"
    corpora = [
        f"{field} {corpus['path']} ({corpus['documents']} documents, {corpus['tokens']} tokens, "
        f"sha256 {corpus['sha256'][:8]})"
        for field, corpus in record.state.get("fingerprint", {"corpora": {}})["corpora"].items()
    ]
    grid = Table.grid(padding=(0, 2))
    for name, text in {
        "checkpoint": str(found.directory),
        "iteration": str(record.iteration),
        "layout": f"{ranks}, schedule {layout.get('pipeline_schedule', '?')}",
        "data position": ", ".join(f"{k} {v}" for k, v in record.data_position.items()) or "none",
        "corpora": "; ".join(corpora) or "none",
        "manifest": record.manifest_sha256 or "none",
        "format version": str(record.format_version),
    }.items():
        grid.add_row(name, Text(text))
    return grid


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    return table


def _files(found: Inspection) -> Table:
    table = _table("\nfiles", "file", "checksum", "bytes", left=2)
    for file in found.files:
        state = Text("good", "green") if file.problem is None else Text(file.problem, "bold red")
        table.add_row(file.name, state, f"{file.entry.size:,}")
    return table


def _shares(found: Inspection) -> Table:
    table = _table("\ntensors", "kind", "dtype", "tensors", "elements", "MB", left=2)
    for share in found.shares:
        counts = f"{share.tensors:,}", f"{share.elements:,}", f"{share.size / 1e6:,.2f}"
        table.add_row(share.kind, share.dtype, *counts)
    total = sum(share.size for share in found.shares)
    count = sum(share.tensors for share in found.shares)
    table.add_row("all", "", f"{count:,}", "", f"{total / 1e6:,.2f}")
    return table


def _scales(rows: list[ScaleRow]) -> Table:
    columns = "module", "role", "scale", "log2", "newest amax", "largest amax", "entries"
    table = _table("\nFP8 scales", *columns, left=2)
    for row in rows:
        low, high = float(row.scale.min()), float(row.scale.max())
        several = row.scale.numel() > 1
        scale = f"{low:.6g} .. {high:.6g}" if several else f"{low:.6g}"
        power = f"{_log2(low):.1f}" + (f" .. {_log2(high):.1f}" if several else "")
        amaxes = f"{row.newest:.4g}", f"{row.largest:.4g}", str(row.filled)
        table.add_row(row.module, row.role, scale, power, *amaxes)
    return table


def _log2(scale: float) -> float:
    """Return a scale's logarithm, NaN for what is no scale: zero, negative, NaN or infinite."""
    return math.log2(scale) if 0 < scale < math.inf else math.nan


def _chart(rows: list[ScaleRow], ascii_only: bool) -> Table:
    """One row of bars for each kind of linear and role: log2 of the smallest scale by layer."""
    lines: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        match = _LAYER.fullmatch(row.module)
        if match is not None:
            line = lines.setdefault((match.group(2), row.role), {})
            line[int(match.group(1))] = _log2(float(row.scale.min()))
    table = _table("\nlog2(scale) by layer", "linear", "role", "layers", "from", "to", left=3)
    for (linear, role), line in sorted(lines.items()):
        values = [line[layer] for layer in sorted(line)]
        bars = sparkline(values, ascii_only)
        known = [value for value in values if not math.isnan(value)] or [math.nan]
        table.add_row(linear, role, bars, f"{min(known):.1f}", f"{max(known):.1f}")
    return table


def sparkline(values: list[float], ascii_only: bool = False) -> str:
    """Return one character a value, its height between the smallest and the largest; ? for NaN."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    known = [value for value in values if not math.isnan(value)] or [0.0]
    low, high = min(known), max(known)
    span = high - low or 1.0
    return "".join(
        "?" if math.isnan(value) else blocks[min(7, int(8 * (value - low) / span))]
        for value in values
    )


def _verdict(found: Inspection) -> Text:
    if found.problems:
        return Text(f"\nDAMAGED: {'; '.join(found.problems)}", "bold red")
    total = sum(file.entry.size for file in found.files)
    if found.flaws:
        text = f"\nfiles as they were written, VALUES UNUSABLE: {summary(found.flaws)}"
        return Text(text, "bold red")
    text = f"\ngood: {len(found.files)} files, {total:,} bytes, all checksums match"
    return Text(text, "bold green")


def changes_text(changes: Iterable[TensorChange], old: Inspection, new: Inspection) -> Group:
    """Return how two checkpoints differ, tensor by tensor, and how far scales moved."""
    title = f"\nfrom {old.directory} to {new.directory}"
    table = _table(title, "tensor", "change", "elements", "largest difference", "log2 drift")
    counts: Counter[str] = Counter()
    drifts: list[float] = []
    for change in changes:
        counts[change.change] += 1
        if change.drift is not None and not math.isnan(change.drift):
            drifts.append(abs(change.drift))
        if counts.total() > _MAX_CHANGES:
            continue
        numbers = ("", "", "")
        if change.change == "changed":
            drift = "" if change.drift is None else f"{change.drift:+.3f}"
            numbers = (f"{change.elements:,}", f"{change.largest:.6g}", drift)
        table.add_row(change.name, f"{change.change} {change.detail}".strip(), *numbers)
    lines: list[RenderableType] = [table]
    if counts.total() > _MAX_CHANGES:
        lines.append(Text(f"... and {counts.total() - _MAX_CHANGES} more"))
    same = len(set(old.record.tensors) & set(new.record.tensors))
    same -= counts["changed"] + counts["reshaped"]
    parts = [f"{same} equal", *(f"{count} {change}" for change, count in counts.items())]
    if drifts:
        parts.append(f"{len(drifts)} scales moved, by up to {max(drifts):.3f} in log2")
    lines.append(Text("\n" + ", ".join(parts)))
    return Group(*lines)
