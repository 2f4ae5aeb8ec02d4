"""A run's state into a checkpoint and back, without the loop around it; collective calls."""

from pathlib import Path

from megafp8.checkpoint import save_checkpoint
from megafp8.config import RunConfig
from megafp8.parallel import Mesh
from megafp8.train.loss_scaler import LossScaler
from megafp8.train.state import TrainState, checkpoint_content, load_run
from megafp8.train.step import TrainingStep


def save_state(
    root: Path,
    state: TrainState,
    step: TrainingStep,
    mesh: Mesh,
    config: RunConfig,
    manifest_sha256: str | None,
    vocab_size: int,
) -> Path:
    """Write a checkpoint of the run and wait for it."""
    tensors, record = checkpoint_content(state, step, mesh, config, manifest_sha256, vocab_size)
    keep_last = config.checkpoint.keep_last
    return save_checkpoint(root, state.iteration, tensors, record, keep_last=keep_last)


def load_state(path: Path, step: TrainingStep, config: RunConfig, scaler: LossScaler) -> TrainState:
    """`load_run` without its certificate."""
    return load_run(path, step, config, scaler)[0]
