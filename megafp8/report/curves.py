"""The loss curve of one or more runs as a picture."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megafp8.errors import DataError
from megafp8.train.metrics import read_metrics

COLOUR = "#0072B2"  # of Okabe and Ito's palette: distinct for colour-blind readers
SMOOTH_FROM = 60  # points; shorter curves are read better as they are
INK, MUTED, GRID = "#222222", "#666666", "#E6E6E6"


def plot_loss_curve(run_dir: Path, output_png: Path, baseline: float) -> None:
    """Draw training loss (line) and validation loss (points) over iterations.

    Long curves are drawn twice: the raw values faintly and their running mean on top. Non-finite
    losses leave a gap.

    Args:
        run_dir: Run folder.
        output_png: File to write.
        baseline: Unigram entropy of the corpus in nats, drawn as a horizontal line.

    Raises:
        DataError: The folder has no metrics, or none with a finite loss.
    """
    # A Figure of its own, not pyplot: no global state, and no display is looked for.
    figure = Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_run(axes, run_dir, read_metrics(run_dir))
    axes.axhline(baseline, color=MUTED, linewidth=1.2, linestyle=(0, (5, 4)), zorder=1)
    axes.annotate(
        f"unigram entropy {baseline:.2f}",
        xy=(1.0, baseline),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color=MUTED,
        fontsize=9,
    )
    _style(axes, f"Loss of {run_dir.name}")
    figure.savefig(output_png)


def _draw_run(axes: Axes, run_dir: Path, entries: Sequence[dict[str, Any]]) -> None:
    iterations = [entry["iteration"] for entry in entries]
    losses = [float(entry["loss"]) for entry in entries]
    if not any(math.isfinite(loss) for loss in losses):
        raise DataError(f"{run_dir}: metrics.jsonl holds no finite loss, nothing to draw")
    gapped = [loss if math.isfinite(loss) else math.nan for loss in losses]
    if len(gapped) >= SMOOTH_FROM:
        axes.plot(iterations, gapped, color=COLOUR, alpha=0.25, linewidth=0.8, zorder=2)
        gapped = running_mean(gapped, len(gapped) // 30)
    # A single iteration would be a line without length.
    marker = "o" if len(gapped) == 1 else ""
    axes.plot(
        iterations, gapped, color=COLOUR, linewidth=1.8, marker=marker, zorder=3,
        label="training",
    )  # fmt: skip
    validation = [
        (entry["iteration"], float(entry["valid_loss"]))
        for entry in entries
        if entry.get("valid_loss") is not None
    ]
    if validation:
        axes.plot(
            *zip(*validation, strict=True), color=COLOUR, linestyle="none", marker="o",
            markersize=6, markerfacecolor="white", markeredgewidth=1.6, zorder=4,
            label="validation",
        )  # fmt: skip


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the finite values within `window` positions to each side.

    At the start, where a loss is steep, the window is symmetric and shrinks to the first value, so
    that the curve does not lag. At the end, where it is flat, the past side stays whole: a window
    of one would end the curve on the noise of the last batch. NaN where no value is finite.
    """
    smooth = []
    for index in range(len(values)):
        past = min(window, index)
        near = values[index - past : index + past + 1]
        finite = [value for value in near if math.isfinite(value)]
        smooth.append(sum(finite) / len(finite) if finite else math.nan)
    return smooth


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_xlabel("iteration", color=INK)
    axes.set_ylabel("loss (nats per token)", color=INK)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.legend(frameon=False, labelcolor=INK)
