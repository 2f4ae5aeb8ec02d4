"""What the check of a GPU machine writes: lines of two tables, in Markdown and for JSON."""

import math
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the table of checks.

    Attributes:
        check: what was looked at.
        found: the number or the reason, in words.
        verdict: "ok", "FAIL", "skipped", or "" for a fact.
        value: the number, if there is one.
    """

    check: str
    found: str
    verdict: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One line of the speed table; None is not measured.

    Attributes:
        name: what ran.
        precision: "bf16", "fp8" with what casts, or "" for ceilings.
        milliseconds: median of one repetition.
        tflops: achieved, in units of 10**12 a second.
        of_ceiling: tflops as a share of the measured product in that precision.
        gigabytes: moved in a second, in units of 10**9.
        of_copy: gigabytes as a share of the measured copy.
        speedup: BF16's time over this one's.
        overhead: share of the time that is not in the three FP8 products: quantization, mostly.
        peak_mib: most memory allocated while it ran.
    """

    name: str
    precision: str
    milliseconds: float
    tflops: float | None = None
    of_ceiling: float | None = None
    gigabytes: float | None = None
    of_copy: float | None = None
    speedup: float | None = None
    overhead: float | None = None
    peak_mib: float | None = None


# Heading and format of a measurement's numbers, in the order of its fields.
_COLUMNS = (
    ("ms", ".3f"),
    ("TFLOP/s", ".1f"),
    ("of ceiling", ".0%"),
    ("GB/s", ".0f"),
    ("of copy", ".0%"),
    ("x bf16", ".2f"),
    ("overhead", ".0%"),
    ("peak MiB", ".0f"),
)


def above(check: str, decibel: float, floor: float) -> Row:
    """A check that has a number in dB, which is to reach a floor."""
    return Row(check, f"{decibel:.1f} dB", "ok" if decibel >= floor else "FAIL", decibel)


def guarded(check: str, call: Callable[[], list[T]], failures: list[Row]) -> list[T]:
    """What a part of the check gives; where it raises, nothing and one failed row more.

    Whatever a GPU, torch or a compiler raises is what the table is for, hence any `Exception`: the
    other parts still run, and the exit code tells.
    """
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
        failures.append(Row(check, text[:300], "FAIL"))
        return []


def render_rows(rows: list[Row]) -> str:
    """Return the table in Markdown."""
    lines = ["| check | found | |", "|---|---|---|"]
    return "\n".join(lines + [f"| {r.check} | {r.found} | {r.verdict} |" for r in rows]) + "\n"


def render_speed(rows: list[Measurement]) -> str:
    """Return the table in Markdown; empty cells are not measured."""
    heads = ["what", "precision", *(head for head, _ in _COLUMNS)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        name, precision, *values = asdict(row).values()
        cells = [
            "" if value is None else format(value, form)
            for value, (_, form) in zip(values, _COLUMNS, strict=True)
        ]
        lines.append("| " + " | ".join([name, precision, *cells]) + " |")
    return "\n".join(lines) + "\n"


def plain(row: Row | Measurement) -> dict[str, Any]:
    """A row for JSON, which has no inf (two equal tensors, in dB) and no NaN: they are null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(row).items()
    }
