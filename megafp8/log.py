"""Rank-aware logging and line-by-line JSON files.

Messages go to stderr, so that stdout carries only what people parse (iteration line, summaries).
"""

import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

ROOT_NAME = "megafp8"
TRACKER_THREAD = "tracker"  # how the names of threads begin that may wait for what is elsewhere
_logger = logging.getLogger(f"{ROOT_NAME}.log")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is now.

    A stream bound at import would print over a progress bar, which replaces `sys.stderr` while it
    is shown, and would write into a closed file under pytest's capture.
    """

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    # A property where the base class has an attribute: looked up anew for each record.
    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _RankFilter(logging.Filter):
    """Lets rank 0 speak; from other ranks only errors, marked with the rank."""

    def __init__(self, rank: int, all_ranks: bool) -> None:
        super().__init__()
        self.rank = rank
        self.all_ranks = all_ranks

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide about one record and note the rank that the formatter prints."""
        record.rank_prefix = f"[rank {self.rank}] " if self.rank or self.all_ranks else ""
        return self.rank == 0 or self.all_ranks or record.levelno >= logging.ERROR


def configure(rank: int, *, level: int = logging.INFO, all_ranks: bool = False) -> None:
    """Set up the package's logger for this process; a later call replaces an earlier one.

    Args:
        rank: World rank. Rank 0 logs from `level` up; the others log errors only.
        level: Lowest level that is shown.
        all_ranks: Let every rank log from `level` up, each line marked with its rank.
    """
    logger = logging.getLogger(ROOT_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = _StderrHandler()
    handler.addFilter(_RankFilter(rank, all_ranks))
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(rank_prefix)s%(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(level)
    # Without this, a root handler set up by another library would print each line twice.
    logger.propagate = False


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module.

    Args:
        name: Usually `__name__`; names outside the package are put under it.

    Returns:
        A logger below "megafp8". Before `configure` it behaves as any Python logger.
    """
    if name == ROOT_NAME or name.startswith(ROOT_NAME + "."):
        return logging.getLogger(name)
    return logging.getLogger(f"{ROOT_NAME}.{name}")


def json_ready(value: Any) -> Any:
    """Return `value` with non-finite floats spelled "nan", "inf" and "-inf".

    JSON has no token for them; Python's own NaN is refused by other readers. Mappings, lists and
    tuples are walked, everything else is returned as it is.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value


class JsonlSink:
    """Appends objects to a file, one JSON object a line, each handed over at once.

    A run that is killed then loses at most the line that was being written. Such a line, without
    its newline, would swallow the next one; it is closed when the file is opened again.

    A file system that is full, or gone for a while, must not end what the lines report about: they
    wait in memory, up to `LIMIT` bytes, and go with a later one. That is told when it begins and
    when it ends.
    """

    LIMIT = 2**24

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = _lacks_final_newline(self.path)
        # Without a buffer of Python's: what could not be written has to be known to the byte.
        self._file = self.path.open("ab", buffering=0)
        self._waiting = b"\n" if unfinished else b""
        self._failing, self._lost = False, 0

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one object and hand it to the operating system."""
        line = json.dumps(json_ready(entry), allow_nan=False) + "\n"
        if len(self._waiting) < self.LIMIT:
            self._waiting += line.encode()
        else:
            self._lost += 1
        self._hand_over()

    def _hand_over(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not self._failing:
                _logger.error("%s: %s; what belongs there waits in memory", self.path, error)
            self._failing = True
            return
        if self._failing:
            _logger.warning("%s is written again; %d lines are lost", self.path, self._lost)
        self._failing, self._lost = False, 0

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file.closed:
            return
        self._hand_over()
        if self._waiting:
            lost = self._lost + self._waiting.count(b"\n")
            _logger.error("%s: its last %d lines are lost", self.path, lost)
        self._file.close()


def _lacks_final_newline(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
