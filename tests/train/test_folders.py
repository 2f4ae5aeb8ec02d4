"""Folders are found unusable, or another run's, before the first step."""

from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import CheckpointRecord, save_checkpoint
from megafp8.errors import CheckpointError
from megafp8.train.folders import checkpoint_to_load, open_run_dir, open_save_dir
from tests.model.small import small_config


def complete_checkpoint(root: Path, iteration: int) -> Path:
    return save_checkpoint(root, iteration, {"w": torch.ones(2)}, CheckpointRecord(iteration))


def test_a_fresh_run_does_not_touch_another_runs_checkpoints(tmp_path) -> None:
    config = small_config(run_dir=str(tmp_path))
    kept = complete_checkpoint(tmp_path / "checkpoints", 4)
    with pytest.raises(CheckpointError, match="found iter_0000004 of another run.*--load"):
        open_save_dir(config, tmp_path, fresh=True)
    assert open_save_dir(config, tmp_path, fresh=False) == kept.parent


def test_folders_that_cannot_be_written(tmp_path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(CheckpointError, match=f"--run-dir {blocked}: FileExistsError"):
        open_run_dir(small_config(run_dir=str(blocked)))
    with pytest.raises(CheckpointError, match=f"saving to {blocked}"):
        open_save_dir(small_config(save=str(blocked)), tmp_path, fresh=True)


def test_an_empty_load_folder_starts_fresh_unless_told_otherwise(tmp_path) -> None:
    assert checkpoint_to_load(small_config(load=str(tmp_path))) is None
    strict = small_config(load=str(tmp_path), exit_on_missing_checkpoint=True)
    with pytest.raises(CheckpointError, match="found no checkpoint there"):
        checkpoint_to_load(strict)
