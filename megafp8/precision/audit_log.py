"""`audit.jsonl`: what happened to a run besides its iterations; one event a line, only added to."""

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megafp8.log import JsonlSink

AUDIT_NAME = "audit.jsonl"
LEVELS = ("info", "warning", "error")
# Every line has all of these; what an event has no use for is null.
FIELDS = tuple(
    "time iteration level event module metric value threshold action data_position "
    "checkpoint_before checkpoint_after reason".split()
)


class AuditLog:
    """Appends events to a run folder's `audit.jsonl`.

    Args:
        run_dir: The run folder.
        enabled: False on ranks other than the one that writes; their events are dropped.
    """

    def __init__(self, run_dir: Path, *, enabled: bool = True) -> None:
        self._sink = JsonlSink(Path(run_dir) / AUDIT_NAME) if enabled else None

    def write(
        self,
        event: str,
        iteration: int,
        *,
        level: str = "info",
        more: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        """Append one event.

        Args:
            event: What happened, such as "resume" or "save_failed".
            iteration: Completed iterations at that time.
            level: One of `LEVELS`.
            more: What this kind of event says beyond the common fields.
            **fields: Common fields by name; those not given are null.
        """
        assert level in LEVELS, level
        unknown = fields.keys() - set(FIELDS)
        assert not unknown, unknown
        if self._sink is None:
            return
        row: dict[str, Any] = dict.fromkeys(FIELDS)
        row |= {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "iteration": iteration,
            "level": level,
            "event": event,
            **fields,
            **(more or {}),
        }
        self._sink.write(row)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._sink is not None:
            self._sink.close()
