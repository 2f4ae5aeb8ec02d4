"""One line of the check of a GPU machine."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        check: what was looked at.
        found: the number or the reason, in words.
        verdict: "ok", "FAIL", "skipped", or "" for a measurement.
        value: the number, if there is one.
    """

    check: str
    found: str
    verdict: str = ""
    value: float | None = None


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
