"""Curves for people who watch elsewhere: TensorBoard and Weights & Biases.

A tracker is a view of the run and never a reason to lose it, or to wait: it starts and works in a
thread of its own. Whatever goes wrong in one (package absent, no network, disk full) becomes one
warning line, and that tracker is off from then on. A service or a file system that does not answer
costs the run some seconds at its end. `metrics.jsonl` holds the same numbers in any case.
"""

import importlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megafp8.config.logging import LoggingConfig
from megafp8.log import TRACKER_THREAD, get_logger
from megafp8.train.metrics import IterationMetrics

WANDB_RUN_ID_FILE = "wandb_run_id"
START_SECONDS = 10.0  # in which a service has to answer
FINISH_SECONDS = 10.0  # that all trackers of a run together may take at its end
WAITING = 1000  # iterations that a tracker may be behind

# What a back end is: what takes the curves and the iteration, and what finishes it.
Backend = tuple[Callable[[Mapping[str, float], int], None], Callable[[], None]]

logger = get_logger(__name__)


def scalars(metrics: IterationMetrics) -> dict[str, float]:
    """Return an iteration's curves under Megatron's TensorBoard names, ours where it has none."""
    values: dict[str, float | None] = {
        "lm loss": metrics.loss,
        "lm loss validation": metrics.valid_loss,
        "learning-rate": metrics.lr,
        "batch-size": metrics.global_batch_size,
        "loss-scale": metrics.loss_scale,
        "grad-norm": metrics.grad_norm,
        "params-norm": metrics.params_norm,
        "num-zeros": metrics.num_zeros_in_grad,
        "iteration-time": metrics.step_time_s,
        "throughput": metrics.tflops_per_device,
        "tokens-per-second": metrics.tokens_per_s,
        "mfu": metrics.mfu,
        "mem-max-allocated-bytes": metrics.mem_peak_bytes,
        "skipped": float(metrics.skipped),
        "communication-bytes": float(
            sum(sum(sizes.values()) for sizes in metrics.comm_bytes.values())
        ),
        **(metrics.extra_losses or {}),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


class Patience:
    """Seconds that the trackers of a run may take together at its end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def wait(self, done: threading.Event) -> bool:
        """Wait for an event, for no longer than what is left; whether it came."""
        began = time.monotonic()
        came = done.wait(max(self.seconds, 0.0))
        self.seconds -= time.monotonic() - began
        return came


class Tracker:
    """Guards one back end: opens it, forwards the curves, and switches it off when it fails.

    Args:
        name: For the warnings.
        package: What is imported for it, here and now: that takes as long as it takes.
        open_backend: Makes the back end of the package; it may fail, or never return.
        patience: Bounds what `close` may take.
        open_offline: Opens one that needs no network, where the other fails to open in time.
    """

    def __init__(
        self,
        name: str,
        package: str,
        open_backend: Callable[[Any], Backend],
        patience: Patience | None = None,
        open_offline: Callable[[Any], Backend] | None = None,
    ) -> None:
        self._name = name
        self._patience = patience or Patience(FINISH_SECONDS)
        self._open_offline = open_offline
        # One place more than points may take: the None that ends the work.
        self._points: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(WAITING + 1)
        self._dropped = 0
        self._closed = False
        self._failed = threading.Event()
        self._done = threading.Event()
        self._turn = 0  # counts up as a back end that does not open is given up
        self._lock = threading.Lock()
        reason = f"no answer within {START_SECONDS:g} s"
        self._timer = threading.Timer(START_SECONDS, self._is_late, (reason,))
        self._timer.daemon = True
        try:
            self._package = importlib.import_module(package)
        except Exception as error:
            self._switch_off(error)
            return
        self._timer.start()
        self._start(open_backend, self._turn)

    @property
    def active(self) -> bool:
        """False once it has failed or is closed."""
        return not (self._closed or self._failed.is_set())

    def observe(self, metrics: IterationMetrics) -> None:
        """Log one iteration; it waits for its turn where the back end is slow."""
        if not self.active:
            return
        if self._points.qsize() < WAITING:
            self._points.put((scalars(metrics), metrics.iteration))
            return
        if not self._dropped:
            logger.warning(
                "%s does not answer: it gets no points from iteration %d on until it does; "
                "metrics.jsonl has them",
                self._name,
                metrics.iteration,
            )
        self._dropped += 1

    def close(self) -> None:
        """Finish what has been handed over, as far as patience goes; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._points.put(None)
        if not self._patience.wait(self._done):
            lost = self._dropped + sum(point is not None for point in list(self._points.queue))
            logger.warning(
                "%s does not answer and is left alone; it lacks %d points or more, metrics.jsonl "
                "has all",
                self._name,
                lost,
            )
        elif self._dropped:
            logger.warning("%s lacks %d points; metrics.jsonl has all", self._name, self._dropped)

    # --------------------------------------------------------------- in threads of the tracker

    def _start(self, open_backend: Callable[[Any], Backend], turn: int, reason: str = "") -> None:
        name, arguments = f"{TRACKER_THREAD}: {self._name}", (open_backend, turn, reason)
        threading.Thread(target=self._work, args=arguments, name=name, daemon=True).start()

    def _work(self, open_backend: Callable[[Any], Backend], turn: int, reason: str) -> None:
        try:
            try:
                log, close = open_backend(self._package)
            except Exception as error:
                if not self._go_offline(_in_a_line(error), turn):
                    raise
                return
            if not self._take_over(turn):
                close()  # it has opened after all, too late
                return
            if reason:
                logger.warning("%s goes on offline: %s", self._name, reason)
            while (point := self._points.get()) is not None:
                log(*point)
            close()
        except Exception as error:
            if self._take_over(turn):
                self._switch_off(error)
            return
        self._done.set()

    def _switch_off(self, error: Exception) -> None:
        """Tell of any exception: packages, and services behind them, raise what they like.

        None of it says anything about the training.
        """
        logger.warning(
            "%s is off: %s; training goes on, metrics.jsonl has the numbers",
            self._name,
            _in_a_line(error),
        )
        self._failed.set()
        self._done.set()

    def _take_over(self, turn: int) -> bool:
        """Whether the back end of this turn is still the one; none follows it then."""
        with self._lock:
            if turn != self._turn:
                return False
            self._open_offline = None
            self._timer.cancel()
            return True

    def _is_late(self, reason: str) -> None:
        if not self._go_offline(reason, 0):
            logger.warning("%s: %s; its points wait, training goes on", self._name, reason)

    def _go_offline(self, reason: str, turn: int) -> bool:
        """Open the other back end, unless there is none or one is open; whether it is done."""
        with self._lock:
            if turn != self._turn or self._open_offline is None:
                return False
            open_offline, self._open_offline = self._open_offline, None
            self._turn += 1
        self._start(open_offline, self._turn, reason)
        return True


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def tensorboard_tracker(
    folder: str | Path, resumed_iteration: int = 0, patience: Patience | None = None
) -> Tracker:
    """Write event files into `folder`; entries after the resumed iteration are hidden."""

    def open_backend(tensorboard: Any) -> Backend:
        # In a fresh run, too: the folder may have been that of a run that was given up.
        writer = tensorboard.SummaryWriter(log_dir=str(folder), purge_step=resumed_iteration + 1)

        def log(values: Mapping[str, float], iteration: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)

        return log, writer.close

    return Tracker("TensorBoard", "torch.utils.tensorboard", open_backend, patience)


def wandb_tracker(
    run_dir: str | Path,
    project: str,
    name: str | None,
    settings: Mapping[str, Any],
    patience: Patience | None = None,
) -> Tracker:
    """Log to Weights & Biases, online or offline as its own settings (WANDB_MODE) say.

    Offline, too, where the service does not answer; `wandb sync` uploads such a curve later.

    Args:
        run_dir: Run folder; `wandb_run_id` there makes a resumed run continue the same curve.
        project: W&B project.
        name: Shown name of the run; W&B invents one for None.
        settings: The run's configuration, shown beside the curves.
        patience: Bounds what closing may take.
    """

    def open_backend(wandb: Any, **more: str) -> Backend:
        run = wandb.init(
            project=project,
            name=name,
            id=_wandb_run_id(Path(run_dir)),
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            **more,
        )
        return lambda values, iteration: run.log(dict(values), step=iteration), run.finish

    return Tracker(
        "Weights & Biases",
        "wandb",
        open_backend,
        patience,
        lambda wandb: open_backend(wandb, mode="offline"),
    )


def _wandb_run_id(run_dir: Path) -> str:
    """Return the folder's run id; made here, since offline runs get none from the service."""
    path = run_dir / WANDB_RUN_ID_FILE
    if path.exists():
        stored = path.read_text(encoding="ascii").strip()
        if stored:
            return stored
    run_dir.mkdir(parents=True, exist_ok=True)
    new = uuid.uuid4().hex[:8]
    path.write_text(new + "\n", encoding="ascii")
    return new


def build_trackers(
    config: LoggingConfig,
    run_dir: str | Path,
    *,
    resumed_iteration: int,
    settings: Mapping[str, Any],
    finish_seconds: float = FINISH_SECONDS,
) -> list[Tracker]:
    """Open the trackers of a run: TensorBoard always, W&B with `--wandb-project`.

    Call it on rank 0 alone.

    Args:
        config: Section `logging`.
        run_dir: Run folder; TensorBoard's default folder lies in it.
        resumed_iteration: Iteration of the loaded checkpoint, 0 for a fresh run.
        settings: The run's configuration as plain values.
        finish_seconds: That they may take together at the end; other ranks wait for it.
    """
    patience = Patience(finish_seconds)
    folder = config.tensorboard_dir or Path(run_dir) / "tensorboard"
    trackers = [tensorboard_tracker(folder, resumed_iteration, patience)]
    if config.wandb_project is not None:
        trackers.append(
            wandb_tracker(run_dir, config.wandb_project, config.wandb_exp_name, settings, patience)
        )
    return trackers
