"""One line of the check of a GPU machine."""

from dataclasses import dataclass


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


def render_rows(rows: list[Row]) -> str:
    """Return the table in Markdown."""
    lines = ["| check | found | |", "|---|---|---|"]
    return "\n".join(lines + [f"| {r.check} | {r.found} | {r.verdict} |" for r in rows]) + "\n"
