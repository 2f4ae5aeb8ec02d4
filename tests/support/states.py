"""A run's state into a checkpoint and back, without the loop around it; collective calls."""

from pathlib import Path

from megafp8.checkpoint import save_checkpoint
from megafp8.train.state import TrainState, checkpoint_content, load_run
from megafp8.train.step import TrainingStep


def save_state(
    root: Path,
    state: TrainState,
    step: TrainingStep,
    vocab_size: int,
    manifest_sha256: str | None = None,
) -> Path:
    """Write a checkpoint of the run and wait for it."""
    tensors, record = checkpoint_content(state, step, manifest_sha256, vocab_size)
    keep_last = step.config.checkpoint.keep_last
    return save_checkpoint(root, state.iteration, tensors, record, keep_last=keep_last)


def load_state(path: Path, step: TrainingStep) -> TrainState:
    """`load_run` into a new position."""
    state = TrainState()
    load_run(path, state, step)
    return state
