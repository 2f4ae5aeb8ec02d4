"""How far a run is and how long it will take: a bar on a terminal, lines in the log elsewhere."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megafp8.log import get_logger
from megafp8.train.metrics import IterationMetrics

REMEMBERED = 100  # iterations whose pace is taken to last, evaluations and saves among them

log = get_logger(__name__)


class ProgressBar:
    """Shows iteration, loss, tokens/s and the time left on a terminal.

    On anything else the log has a line with the time left at every tenth of the run.

    Args:
        total_iterations: Iterations of the run.
        completed: Iterations that an earlier part of the run has done.
        console: Where to draw; stderr by default, so that redirected stdout holds lines only.
        clock: Seconds; replaced in tests.
    """

    def __init__(
        self,
        total_iterations: int,
        *,
        completed: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_iterations
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._progress: Progress | None = None
        console = console or Console(stderr=True)
        if not console.is_terminal:
            return
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            # Not rich's own, which knows no pace where an iteration takes longer than 30 s.
            TextColumn("{task.fields[left]}"),
            console=console,
            # While the bar is shown, rich sends the redirected streams to its own console. A
            # stdout that goes to a file must stay what it is, or the file would get no lines.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(
            "training", total=total_iterations, completed=completed, status="", left=""
        )
        self._progress.start()

    def observe(self, metrics: IterationMetrics) -> None:
        """Move the bar to this iteration."""
        self._seen.append((metrics.iteration, self._clock()))
        left = self._time_left()
        if self._progress is not None:
            loss = f"{metrics.loss:.4f}" if math.isfinite(metrics.loss) else str(metrics.loss)
            self._progress.update(
                self._task,
                completed=metrics.iteration,
                status=f"loss {loss}  {metrics.tokens_per_s:,.0f} tokens/s",
                left=left and f"{left} left",
            )
        elif left and self._begins_a_tenth(metrics.iteration):
            log.info("iteration %d of %d: %s left", metrics.iteration, self._total, left)

    def _time_left(self) -> str:
        """In words; empty after the first iteration, which also pays for the start."""
        (first, began), (last, now) = self._seen[0], self._seen[-1]
        if last == first:
            return ""
        seconds = (now - began) / (last - first) * (self._total - last)
        return str(timedelta(seconds=round(seconds)))

    def _begins_a_tenth(self, iteration: int) -> bool:
        tenth, before = 10 * iteration // self._total, 10 * (iteration - 1) // self._total
        return before < tenth and iteration < self._total

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
