"""Folders are found unusable, or another run's, before the first step."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import CheckpointRecord, save_checkpoint
from megafp8.checkpoint.agree import on_first_rank
from megafp8.checkpoint.files import is_being_read
from megafp8.errors import CheckpointError, PrecisionError
from megafp8.train import folders
from megafp8.train.folders import (
    checkpoint_to_load,
    hold_save_dir,
    open_run_dir,
    open_save_dir,
)
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
    for given in (blocked, blocked / "sub" / "folder"):
        with pytest.raises(CheckpointError) as raised:
            open_run_dir(small_config(run_dir=str(given)))
        wrong = f"{blocked} is a file, expected a folder; give another"
        assert str(raised.value) == f"--run-dir {given}: {wrong}"
        with pytest.raises(CheckpointError) as raised:
            open_save_dir(small_config(save=str(given)), tmp_path, fresh=True)
        assert str(raised.value) == f"saving to {given}: {wrong}"
    long = tmp_path / ("x" * 300)
    with pytest.raises(CheckpointError, match=f"{long} cannot be written: File name too long"):
        open_run_dir(small_config(run_dir=str(long)))


def test_a_folder_of_partial_checkpoints_is_named_once(tmp_path) -> None:
    partial = tmp_path / "iter_0000003"
    partial.mkdir()
    with pytest.raises(CheckpointError) as raised:
        open_save_dir(small_config(save=str(tmp_path)), tmp_path, fresh=True)
    assert str(raised.value) == (
        f"saving to {tmp_path}: {tmp_path} holds no usable checkpoint, found iter_0000003; give "
        "another --save, or remove what is partial there"
    )
    with pytest.raises(CheckpointError) as raised:
        checkpoint_to_load(small_config(load=str(tmp_path)), ExitStack())
    assert str(raised.value) == (
        f"--load: {tmp_path} holds no usable checkpoint, found iter_0000003; give another --load, "
        "or an empty directory to start fresh"
    )


def test_an_error_that_was_written_for_users_keeps_its_words() -> None:
    def fail() -> None:
        raise PrecisionError("no such layer")

    with pytest.raises(CheckpointError) as raised:
        on_first_rank("writing to runs/x", fail, None)
    assert str(raised.value) == "writing to runs/x: no such layer"


@pytest.mark.parametrize("strict", ["exit_on_missing_checkpoint", "finetune"])
def test_an_empty_load_folder_starts_fresh_unless_told_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strict: str
) -> None:
    for folder, what in ((tmp_path, "holds no checkpoint"), (tmp_path / "no", "does not exist")):
        assert checkpoint_to_load(small_config(load=str(folder)), ExitStack()) is None
        assert f"--load {folder} {what}: training starts fresh" in caplog.text
    with pytest.raises(CheckpointError, match="found no checkpoint there, and --"):
        checkpoint_to_load(small_config(load=str(tmp_path), **{strict: True}), ExitStack())


def test_what_load_found_is_kept_until_it_is_loaded(tmp_path: Path) -> None:
    kept = complete_checkpoint(tmp_path, 4)
    with ExitStack() as held:
        assert checkpoint_to_load(small_config(load=str(tmp_path)), held) == kept
        assert is_being_read(kept)
    assert not is_being_read(kept)


def test_a_folder_is_held_for_the_whole_run(tmp_path: Path) -> None:
    config = small_config(save=str(tmp_path))
    with hold_save_dir(config, tmp_path):
        with pytest.raises(CheckpointError, match="in use by another job"):
            with hold_save_dir(config, tmp_path):
                pass
    with hold_save_dir(config, tmp_path) as check_ours:
        check_ours()


def test_jobs_that_try_a_folder_at_the_same_moment(tmp_path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(folders._probe, [tmp_path] * 400))
    assert list(tmp_path.iterdir()) == []
