"""When a run's checkpoints are written and what happens if one cannot be."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from megafp8.checkpoint import Saver
from megafp8.checkpoint.agree import on_first_rank
from megafp8.errors import CheckpointError, TrainingError
from megafp8.log import get_logger
from megafp8.precision import AuditLog
from megafp8.train.state import TrainState, checkpoint_content
from megafp8.train.step import TrainingStep

log = get_logger(__name__)

# How long a run that fails waits for a save that it had begun, while its ranks still answer.
ABANDON_SECONDS = 5.0


class RunSaver:
    """Saves one run.

    A save that fails leaves the checkpoints before it, is told in the log and the audit log, and
    training goes on: stopping would lose what a later save may still keep. A run whose last save
    failed ends with an error.

    Attributes:
        newest: The checkpoint that a restart would go on from; None if there is none.
    """

    def __init__(
        self,
        step: TrainingStep,
        state: TrainState,
        audit: AuditLog,
        *,
        folder: Path,
        ours: Callable[[], None],
        newest: Path | None,
        manifest_sha256: str | None,
        vocab_size: int,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare; a collective call.

        Args:
            step: owns model and optimizer.
            state: position; what is loaded into it counts as saved.
            audit: where saves and failures are noted.
            folder: of the checkpoints.
            ours: raises, on rank 0, if the folder is another job's by now.
            newest: the checkpoint that was loaded.
            manifest_sha256: recorded in checkpoints.
            vocab_size: recorded in checkpoints.
            fingerprint: of what the run reads, recorded in checkpoints.
        """
        self.step, self.state = step, state
        self.audit, self.folder, self.ours = audit, folder, ours
        self.manifest_sha256, self.vocab_size = manifest_sha256, vocab_size
        self.fingerprint = fingerprint
        # Writing takes longer than a step: a limit that fits collectives must not end it.
        timeout = step.mesh.world.timeout
        limit = None if timeout is None else max(timeout, timedelta(minutes=10))
        self._saver = Saver(
            background=step.config.checkpoint.async_save, timeout=limit, report=self._ended
        )
        self._saved = state.iteration
        self.newest = newest
        self._positions: dict[int, int] = {}
        self._ending = False
        self._refused: CheckpointError | None = None

    def save(self) -> None:
        """Save the present state, or begin to."""
        self._refused = None
        try:
            on_first_rank(f"saving to {self.folder}", self.ours, None)
        except CheckpointError as error:
            self._refused = error
            self._positions[self.state.iteration] = self.state.consumed_samples
            self._ended(self.state.iteration, None, error)
            return
        tensors, record = checkpoint_content(
            self.state, self.step, self.manifest_sha256, self.vocab_size, self.fingerprint
        )
        self._positions[self.state.iteration] = self.state.consumed_samples
        self._saver.save(
            self.folder,
            self.state.iteration,
            tensors,
            record,
            keep_last=self.step.config.checkpoint.keep_last,
        )

    def poll(self) -> None:
        """Report a save that has ended beside training."""
        self._saver.poll()

    def finish(self) -> None:
        """Save the present state unless that is done, and wait.

        Raises:
            TrainingError: on every rank; it could not be saved.
        """
        self._saver.wait()
        self._ending = True
        if self._saved != self.state.iteration:
            self.save()
            self._saver.wait()
        error = self._refused or self._saver.last_error
        if self._saved != self.state.iteration and error is not None:
            raise TrainingError(
                f"iteration {self.state.iteration} is not saved, the last checkpoint is "
                f"{self.newest or 'none'}: {error}"
            ) from error

    def abandon(self) -> None:
        """Give a save in flight a moment to end; for a run that fails."""
        self._ending = True
        if not self._saver.wait(ABANDON_SECONDS):
            log.error("the save in flight is given up; its directory is removed by the next run")

    def _ended(self, iteration: int, path: Path | None, error: CheckpointError | None) -> None:
        position = {"consumed_samples": self._positions.pop(iteration)}
        before = None if self.newest is None else str(self.newest)
        if path is not None:
            self._saved, self.newest = iteration, path
            log.info("saved %s", path)
            self.audit.write(
                "save",
                iteration,
                data_position=position,
                checkpoint_before=before,
                checkpoint_after=str(path),
            )
            return
        then = "the run ends" if self._ending else "training goes on"
        log.warning("SAVE FAILED at iteration %d, %s: %s", iteration, then, error)
        self.audit.write(
            "save_failed",
            iteration,
            level="error",
            action="exit" if self._ending else "continue",
            data_position=position,
            checkpoint_before=before,
            reason=str(error),
        )
