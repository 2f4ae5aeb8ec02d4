"""A progress bar beside the iteration line, where somebody watches."""

import math
import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megafp8.train.metrics import IterationMetrics


class ProgressBar:
    """Shows iteration, loss and tokens/s on a terminal; on anything else it does nothing.

    Args:
        total_iterations: Iterations of the run.
        completed: Iterations that an earlier part of the run has done.
        console: Where to draw; stderr by default, so that redirected stdout holds lines only.
    """

    def __init__(
        self, total_iterations: int, *, completed: int = 0, console: Console | None = None
    ) -> None:
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
            TimeRemainingColumn(),
            console=console,
            # While the bar is shown, rich sends the redirected streams to its own console. A
            # stdout that goes to a file must stay what it is, or the file would get no lines.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(
            "training", total=total_iterations, completed=completed, status=""
        )
        self._progress.start()

    def observe(self, metrics: IterationMetrics) -> None:
        """Move the bar to this iteration."""
        if self._progress is not None:
            loss = f"{metrics.loss:.4f}" if math.isfinite(metrics.loss) else str(metrics.loss)
            self._progress.update(
                self._task,
                completed=metrics.iteration,
                status=f"loss {loss}  {metrics.tokens_per_s:,.0f} tokens/s",
            )

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
