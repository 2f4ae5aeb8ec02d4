"""Curves for people who watch elsewhere: TensorBoard and Weights & Biases.

A tracker is a view of the run and never a reason to lose it: whatever goes wrong in one (package
absent, no network, disk full) becomes one warning line, and that tracker is off from then on.
`metrics.jsonl` holds the same numbers in any case.
"""

import importlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megafp8.config.records import LoggingConfig
from megafp8.log import get_logger
from megafp8.train.metrics import IterationMetrics

WANDB_RUN_ID_FILE = "wandb_run_id"

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
    }
    return {name: float(value) for name, value in values.items() if value is not None}


class Tracker:
    """Guards one back end: opens it, forwards the curves, and switches it off when it fails.

    Args:
        name: For the warning.
        open_backend: Returns (log, close); `log` takes the curves and the iteration.
    """

    def __init__(
        self,
        name: str,
        open_backend: Callable[
            [], tuple[Callable[[Mapping[str, float], int], None], Callable[[], None]]
        ],
    ) -> None:
        self._name = name
        self._log: Callable[[Mapping[str, float], int], None] | None = None
        self._close: Callable[[], None] | None = None

        def start() -> None:
            self._log, self._close = open_backend()

        self._guard(start)

    @property
    def active(self) -> bool:
        """False once it has failed or is closed."""
        return self._log is not None

    def observe(self, metrics: IterationMetrics) -> None:
        """Log one iteration."""
        log = self._log
        if log is not None:
            self._guard(lambda: log(scalars(metrics), metrics.iteration))

    def close(self) -> None:
        """Finish; a second call does nothing."""
        close, self._close, self._log = self._close, None, None
        if close is not None:
            self._guard(close)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            # Any exception: the packages and the services behind them raise what they like, and
            # none of it says anything about the training.
            first_line = (str(error).splitlines() or [""])[0]
            logger.warning(
                "%s is off: %s: %s; training goes on, metrics.jsonl has the numbers",
                self._name,
                type(error).__name__,
                first_line,
            )
            self._log = self._close = None


def tensorboard_tracker(folder: str | Path, resumed_iteration: int = 0) -> Tracker:
    """Write event files into `folder`; entries after the resumed iteration are hidden."""

    def open_backend() -> tuple[Callable[[Mapping[str, float], int], None], Callable[[], None]]:
        tensorboard = importlib.import_module("torch.utils.tensorboard")
        # In a fresh run, too: the folder may have been that of a run that was given up.
        writer = tensorboard.SummaryWriter(log_dir=str(folder), purge_step=resumed_iteration + 1)

        def log(values: Mapping[str, float], iteration: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, iteration)

        return log, writer.close

    return Tracker("TensorBoard", open_backend)


def wandb_tracker(
    run_dir: str | Path, project: str, name: str | None, settings: Mapping[str, Any]
) -> Tracker:
    """Log to Weights & Biases, online or offline as its own settings (WANDB_MODE) say.

    Args:
        run_dir: Run folder; `wandb_run_id` there makes a resumed run continue the same curve.
        project: W&B project.
        name: Shown name of the run; W&B invents one for None.
        settings: The run's configuration, shown beside the curves.
    """

    def open_backend() -> tuple[Callable[[Mapping[str, float], int], None], Callable[[], None]]:
        wandb = importlib.import_module("wandb")
        run = wandb.init(
            project=project,
            name=name,
            id=_wandb_run_id(Path(run_dir)),
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
        )
        return lambda values, iteration: run.log(dict(values), step=iteration), run.finish

    return Tracker("Weights & Biases", open_backend)


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
) -> list[Tracker]:
    """Open the trackers of a run: TensorBoard always, W&B with `--wandb-project`.

    Call it on rank 0 alone.

    Args:
        config: Section `logging`.
        run_dir: Run folder; TensorBoard's default folder lies in it.
        resumed_iteration: Iteration of the loaded checkpoint, 0 for a fresh run.
        settings: The run's configuration as plain values.
    """
    folder = config.tensorboard_dir or Path(run_dir) / "tensorboard"
    trackers = [tensorboard_tracker(folder, resumed_iteration)]
    if config.wandb_project is not None:
        trackers.append(
            wandb_tracker(run_dir, config.wandb_project, config.wandb_exp_name, settings)
        )
    return trackers
