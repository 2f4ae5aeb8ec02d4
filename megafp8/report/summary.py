"""A few lines about a run, for the end of a script."""

from pathlib import Path
from statistics import median
from typing import Any

from megafp8.errors import DataError
from megafp8.train.metrics import read_metrics


def summarize_run(run_dir: str | Path) -> str:
    """Return the summary of a run folder, one `name: value` a line.

    The lines are: run folder, iterations, final loss, last valid loss (where there was an
    evaluation), tokens/s (median, since the first iterations also pay for the start), and skipped
    iterations (where there were any).

    Raises:
        DataError: The folder has no metrics, or an empty file.
    """
    entries = read_metrics(run_dir)
    if not entries:
        raise DataError(f"{run_dir}: metrics.jsonl holds no iteration")
    last = entries[-1]
    lines = [
        ("run folder", str(run_dir)),
        ("iterations", str(last["iteration"])),
        ("final loss", _final_loss(entries)),
    ]
    evaluated = [entry for entry in entries if entry.get("valid_loss") is not None]
    if evaluated:
        at = evaluated[-1]["iteration"]
        lines.append(
            ("last valid loss", f"{float(evaluated[-1]['valid_loss']):.4f} (iteration {at})")
        )
    lines.append(("tokens/s (median)", _median_speed(entries)))
    skipped = sum(bool(entry.get("skipped")) for entry in entries)
    if skipped:
        lines.append(("skipped iterations", str(skipped)))
    width = max(len(name) for name, _ in lines) + 1
    return "\n".join(f"{name + ':':<{width}} {value}" for name, value in lines)


LAST = 20  # iterations whose mean says more than the last one's noise


def _final_loss(entries: list[dict[str, Any]]) -> str:
    losses = [float(entry["loss"]) for entry in entries]
    text = f"{losses[-1]:.4f}"
    if len(losses) > LAST:
        text += f" (mean of the last {LAST}: {sum(losses[-LAST:]) / LAST:.4f})"
    return text


def _median_speed(entries: list[dict[str, Any]]) -> str:
    speeds = [entry["tokens_per_s"] for entry in entries if entry.get("tokens_per_s") is not None]
    return f"{median(speeds):,.0f}" if speeds else "not recorded"
