"""What a run reports of each iteration: `metrics.jsonl` and Megatron's iteration line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from megafp8.errors import DataError
from megafp8.log import JsonlSink, get_logger

METRICS_FILE = "metrics.jsonl"
# Left out of a line where they are not measured; all other keys are always there.
OPTIONAL_KEYS = ("valid_loss", "params_norm", "num_zeros_in_grad", "extra_losses")

logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class IterationMetrics:
    """One iteration, reduced over all ranks; the fields are the keys of `metrics.jsonl`.

    Attributes:
        iteration: 1 for the first.
        loss: Mean over the unmasked tokens of the global batch, in nats.
        grad_norm: Before clipping; None where it is not computed.
        lr: Rate that this iteration's step used.
        tokens: Tokens of the global batch, masked ones included.
        consumed_samples: After this iteration.
        step_time_s: Wall time of the iteration, evaluation and checkpoints left out.
        tokens_per_s: Over all devices.
        tflops_per_device: Model FLOP/s of one device in 10**12; None where not computed.
        mfu: Share of the device's peak; None where the peak is not known (CPU).
        mem_peak_bytes: Largest peak of a rank; None where the device does not tell.
        skipped: The optimizer step was left out.
        comm_bytes: `{kind: {dtype: bytes}}`, summed over ranks.
        comm_calls: `{kind: calls}`, the maximum over ranks.
        valid_loss: Where the iteration ended with an evaluation.
        global_batch_size: Samples of this iteration.
        loss_scale: Factor on the loss; 1.0 without one.
        params_norm: With `--log-params-norm`.
        num_zeros_in_grad: With `--log-num-zeros-in-grad`.
        extra_losses: Losses beside the main one by name, in the same unit; None without any.
    """

    iteration: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    consumed_samples: int
    step_time_s: float
    tokens_per_s: float
    tflops_per_device: float | None
    mfu: float | None
    mem_peak_bytes: int | None
    skipped: bool
    comm_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    comm_calls: Mapping[str, int] = field(default_factory=dict)
    valid_loss: float | None = None
    global_batch_size: int
    loss_scale: float = 1.0
    params_norm: float | None = None
    num_zeros_in_grad: int | None = None
    extra_losses: Mapping[str, float] | None = None

    def entry(self) -> dict[str, Any]:
        """Return the object that is written to `metrics.jsonl`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {
            name: value
            for name, value in values.items()
            if value is not None or name not in OPTIONAL_KEYS
        }


class Observer(Protocol):
    """Something that is shown every iteration: a tracker, a progress bar."""

    def observe(self, metrics: IterationMetrics) -> None:
        """Take one iteration; must not raise."""
        ...

    def close(self) -> None:
        """Finish what is open."""
        ...


def iteration_line(
    metrics: IterationMetrics,
    *,
    total_iterations: int,
    loss: float,
    elapsed_ms: float,
    skipped_iterations: int,
    nan_iterations: int,
    throughput: float | None = None,
    timestamp: datetime | None = None,
) -> str:
    """Return the iteration line with Megatron's words, order and number formats.

    Unlike Megatron, which leaves a NaN loss out of the line, it is printed (as NAN).

    Args:
        metrics: The last iteration of the interval.
        total_iterations: Iterations of the run.
        loss: Mean over the interval.
        elapsed_ms: Mean time per iteration.
        skipped_iterations: Steps left out in the interval.
        nan_iterations: Iterations of the interval with a non-finite loss.
        throughput: TFLOP/s per device; printed where given.
        timestamp: Printed first where given.
    """
    parts = [
        f" iteration {metrics.iteration:8d}/{total_iterations:8d}",
        f" consumed samples: {metrics.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {elapsed_ms:.1f}",
    ]
    if throughput is not None:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {throughput:.1f}")
    parts += [
        f" learning rate: {metrics.lr:.6E}",
        f" global batch size: {metrics.global_batch_size:5d}",
        f" lm loss: {loss:.6E}",
        f" loss scale: {metrics.loss_scale:.1f}",
    ]
    if metrics.grad_norm is not None:
        parts.append(f" grad norm: {metrics.grad_norm:.3f}")
    if metrics.num_zeros_in_grad is not None:
        parts.append(f" num zeros: {metrics.num_zeros_in_grad}")
    if metrics.params_norm is not None:
        parts.append(f" params norm: {metrics.params_norm:.3f}")
    parts += [
        f" number of skipped iterations: {skipped_iterations:3d}",
        f" number of nan iterations: {nan_iterations:3d}",
    ]
    prefix = "" if timestamp is None else f" [{timestamp:%Y-%m-%d %H:%M:%S.%f}]"
    return prefix + " |".join([*parts, ""])


class Interval:
    """Collects the iterations between two lines, by Megatron's rules.

    The loss is the mean over the iterations whose step was taken. If every step was skipped there
    is no such mean, and the last loss is shown rather than Megatron's 0.
    """

    def __init__(self) -> None:
        self._items: list[IterationMetrics] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, metrics: IterationMetrics) -> None:
        """Take one iteration."""
        self._items.append(metrics)

    def line(
        self, total_iterations: int, *, with_throughput: bool, timestamp: datetime | None = None
    ) -> str:
        """Return the line for what was collected and start over."""
        items, self._items = self._items, []
        taken = [item.loss for item in items if not item.skipped]
        seconds = sum(item.step_time_s for item in items)
        throughput = None
        if with_throughput and items[-1].tflops_per_device is not None:
            work = sum((item.tflops_per_device or 0.0) * item.step_time_s for item in items)
            throughput = work / seconds if seconds > 0 else 0.0
        return iteration_line(
            items[-1],
            total_iterations=total_iterations,
            loss=sum(taken) / len(taken) if taken else items[-1].loss,
            elapsed_ms=1000.0 * seconds / len(items),
            skipped_iterations=sum(item.skipped for item in items),
            nan_iterations=sum(not math.isfinite(item.loss) for item in items),
            throughput=throughput,
            timestamp=timestamp,
        )


class MetricsWriter:
    """Writes `metrics.jsonl`, prints the iteration line and tells the observers.

    Args:
        run_dir: Run folder; made if it is not there.
        enabled: True on rank 0 alone; elsewhere nothing is written, read or printed.
        total_iterations: Iterations of the run.
        log_interval: A line is printed for each iteration that is a multiple of it, and for the
            first and the last one.
        resumed_iteration: Iteration of the loaded checkpoint, 0 for a fresh run. Entries after it
            come from iterations that will run again, and are dropped; a fresh run finds those of
            another one and sets them aside.
        log_throughput: Show TFLOP/s in the line.
        observers: Closed together with the writer.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        enabled: bool,
        total_iterations: int,
        log_interval: int,
        resumed_iteration: int = 0,
        log_throughput: bool = False,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._enabled = enabled
        if not enabled:
            return
        self._total_iterations = total_iterations
        self._log_interval = log_interval
        self._first_iteration = resumed_iteration + 1
        self._log_throughput = log_throughput
        self._observers = tuple(observers)
        self._interval = Interval()
        self._prints = True
        path = Path(run_dir) / METRICS_FILE
        if resumed_iteration == 0:
            set_aside_metrics(path)
        truncate_metrics(path, resumed_iteration)
        self._sink = JsonlSink(path)

    def write(self, metrics: IterationMetrics) -> None:
        """Report one iteration; the file is flushed before this returns."""
        if not self._enabled:
            return
        self._sink.write(metrics.entry())
        self._interval.add(metrics)
        ends = metrics.iteration in (self._first_iteration, self._total_iterations)
        if ends or metrics.iteration % self._log_interval == 0:
            self._print_line()
        for observer in self._observers:
            observer.observe(metrics)

    def _print_line(self) -> None:
        """Print the line of the iterations since the last one."""
        line = self._interval.line(
            self._total_iterations,
            with_throughput=self._log_throughput,
            timestamp=datetime.now(),
        )
        self._print(line)

    def _print(self, line: str) -> None:
        """Print, or warn once: whoever reads along may have left, or the disk under it be full."""
        if not self._prints:
            return
        try:
            print(line, flush=True)
        except OSError as error:
            self._prints = False
            logger.warning("stdout: %s; no more iteration lines, %s has them", error, METRICS_FILE)

    def close(self) -> None:
        """Close the file and the observers; a run that was stopped early prints its last line."""
        if self._enabled:
            if self._interval:
                self._print_line()
            self._sink.close()
            for observer in self._observers:
                observer.close()


def set_aside_metrics(path: Path) -> Path | None:
    """Rename another run's metrics, by the time of its last entry.

    Returns:
        The new path; None if there was nothing.
    """
    if not path.exists() or not path.stat().st_size:
        return None
    stamp = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
    aside, number = path.with_name(f"{path.stem}.{stamp}{path.suffix}"), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.stem}.{stamp}-{number}{path.suffix}")
    path.rename(aside)
    logger.warning(
        "%s was of another run, and this one starts fresh: it is %s now", path, aside.name
    )
    return aside


def truncate_metrics(path: Path, last_iteration: int) -> int:
    """Drop the entries after `last_iteration` and what a killed run left half-written.

    The file is replaced in one step, so a crash here loses nothing.

    Returns:
        The number of lines dropped.
    """
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _entry_until(line, last_iteration)]
    dropped = len(lines) - len(kept)
    if dropped:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)
        logger.info("%s: dropped %d entries after iteration %d", path, dropped, last_iteration)
    return dropped


def _entry_until(line: str, last_iteration: int) -> bool:
    entry = _parse(line)
    return entry is not None and line.endswith("\n") and entry["iteration"] <= last_iteration


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("iteration"), int) else None


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Read a run's `metrics.jsonl`.

    Returns:
        The entries in the file's order, with "nan", "inf" and "-inf" turned back into floats. A
        line that a killed or still running training has half written is left out.

    Raises:
        DataError: The folder holds no metrics.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{run_dir}: no {METRICS_FILE}; is this a run folder?")
    lines: Iterable[str] = path.read_text(encoding="utf-8", errors="replace").splitlines()
    entries = (_parse(line) for line in lines)
    return [
        {key: _number(value) for key, value in entry.items()}
        for entry in entries
        if entry is not None
    ]


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _number(part) for name, part in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value
