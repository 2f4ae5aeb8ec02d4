"""Saves of a run one after another: in the call itself, or beside training in a thread.

Beside training the call copies this rank's state to host memory, which is all that training waits
for, and a thread writes the copy. One save is in flight at a time: the next waits for it.

A save's collectives run in a gloo group of their own: those of a thread cannot meet training's, and
ranks that wait while the first one commits have a time limit made for that.
"""

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megafp8.checkpoint.agree import describe
from megafp8.checkpoint.record import CheckpointRecord
from megafp8.checkpoint.save import save_checkpoint, write_checkpoint
from megafp8.checkpoint.snapshot import Staged, stage
from megafp8.errors import CheckpointError


class Saver:
    """Writes a run's checkpoints; all ranks of the default group make the same calls.

    Attributes:
        background: Whether saves run beside training.
        last_error: Why the newest finished save failed; None if it did not.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        timeout: timedelta | None = None,
        report: Callable[[int, Path | None, CheckpointError | None], None] | None = None,
    ) -> None:
        """Prepare; a collective call.

        Args:
            background: Write in a thread.
            timeout: Of a save's collectives; None for torch's default.
            report: Called on every rank as a save ends, in the training thread, with the
                iteration and either the checkpoint or the error.
        """
        self.background = background
        self.last_error: CheckpointError | None = None
        self._report = report
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            group = dist.new_group(backend="gloo", timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)  # every rank of the default group is in it
            self._group = group
        self._buffers: dict[MetadataIndex, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._iteration = 0
        self._outcome: Path | CheckpointError | None = None

    def save(
        self,
        root: Path,
        iteration: int,
        tensors: Mapping[str, Tensor],
        record: CheckpointRecord,
        keep_last: int | None = None,
    ) -> None:
        """Save, or begin to; the arguments are those of `save_checkpoint`.

        A save that fails is reported and leaves what was there before. It raises nothing.
        """
        self.wait()
        self._iteration = iteration
        if not self.background:
            try:
                self._outcome = save_checkpoint(
                    root, iteration, tensors, record, self._group, keep_last
                )
            except CheckpointError as error:
                self._outcome = error
            self._finish()
            return
        staged: Staged | Exception
        try:
            staged = stage(tensors, self._buffers)
        except Exception as error:  # raised in the thread, where all ranks hear of it
            staged = error

        def copy() -> Staged:
            if isinstance(staged, Exception):
                raise staged
            return staged

        def write() -> None:
            try:
                self._outcome = write_checkpoint(
                    root, iteration, copy, record, self._group, keep_last
                )
            except CheckpointError as error:
                self._outcome = error
            except Exception as error:  # a peer that is gone; training is about to learn of it too
                self._outcome = CheckpointError(f"saving iteration {iteration}: {describe(error)}")

        name = f"save of iteration {iteration}"
        # A process that has to end while peers are gone must not wait for this one.
        self._thread = threading.Thread(target=write, name=name, daemon=True)
        self._thread.start()

    def poll(self) -> None:
        """Report a save that has ended; no collective and no waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save in flight, report it, and tell whether none is left.

        Args:
            timeout: Seconds, or None for as long as it takes.
        """
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._thread = None
        self._finish()
        return True

    def _finish(self) -> None:
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        error = outcome if isinstance(outcome, CheckpointError) else None
        self.last_error = error
        if self._report is not None:
            path = outcome if isinstance(outcome, Path) else None
            self._report(self._iteration, path, error)
