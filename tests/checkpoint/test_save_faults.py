"""A save that fails or is killed anywhere leaves the last good checkpoint in place (P08)."""

import errno
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import megafp8.checkpoint.save as save_module
from megafp8.checkpoint import find_checkpoint, load_tensors, read_record, save_checkpoint
from megafp8.checkpoint.writer import ChecksumStream, ShardFile
from megafp8.errors import CheckpointError
from tests.checkpoint.sharded import record
from tests.support.disks import small_disk
from tests.support.limits import PATIENCE_S
from tests.support.ranks import Ranks


def model(value: float) -> dict[str, Tensor]:
    return {"a": torch.full((64, 3), float(value)), "b": torch.full((5,), float(value))}


def value_in(directory: Path) -> float:
    """Load and verify; the one value that all elements have."""
    tensors = model(-1.0)
    assert load_tensors(directory, tensors) == []
    values = torch.cat([tensor.flatten() for tensor in tensors.values()]).unique()
    assert len(values) == 1
    assert read_record(directory).data_position["consumed_samples"] >= 0
    return values.item()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# ------------------------------------------------------------------------------- what is kept


def test_a_folder_holds_checkpoints_and_latest_alone(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "checkpoints"
    path = save_checkpoint(root, 5, model(5.0), record(5))
    assert path == root / "iter_0000005"
    assert names(root) == ["iter_0000005", "latest"]
    assert names(path) == [".metadata", "__0_0.distcp", "megafp8.json"]
    saved = read_record(path)
    assert saved.config == record(5).config and saved.iteration == 5
    assert saved.tensors["a"].shape == (64, 3) and saved.tensors["a"].dtype == "float32"
    assert saved.files.keys() == {".metadata", "__0_0.distcp"}


def test_an_iteration_is_replaced(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 5, model(1.0), record(5))
    save_checkpoint(tmp_path, 5, model(2.0), record(5))
    assert names(tmp_path) == ["iter_0000005", "latest"]
    assert value_in(tmp_path / "iter_0000005") == 2.0


def test_keep_last(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save_checkpoint(tmp_path, iteration, model(iteration), record(iteration), keep_last=2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", "latest"]
    # Going on from an earlier one: the later checkpoints are another branch, not older ones.
    save_checkpoint(tmp_path, 2, model(2.5), record(2), keep_last=1)
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004", "latest"]
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"


def test_leftovers_are_cleared_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "tmp_iter_0000005.0123abcd").mkdir()
    (tmp_path / "tmp_iter_notes").mkdir()  # not a name of ours
    save_checkpoint(tmp_path, 6, model(6.0), record(6))
    assert names(tmp_path) == ["iter_0000006", "latest", "tmp_iter_notes"]


# ------------------------------------------------------------------------- killed at each step


class Killed(BaseException):
    """Stands for SIGKILL: no handler for errors runs."""


STEPS: list[tuple[Any, str]] = [
    (os, "mkdir"),
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (shutil, "rmtree"),
    (ShardFile, "append"),
    (save_module, "write_index"),
]


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int, after: bool) -> list[str]:
    """Make step number `at` of a save raise, before or after it is done; return the steps seen."""
    seen: list[str] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) - 1 == at and not after:
                raise Killed
            result = function(*args, **kwargs)
            if len(seen) - 1 >= at and at >= 0:
                raise Killed
            return result

        return step

    for module, name in STEPS:
        monkeypatch.setattr(module, name, wrap(name, getattr(module, name)))
    return seen


@pytest.mark.parametrize("again", [False, True], ids=["next iteration", "same iteration"])
def test_killed_at_any_step(tmp_path: Path, again: bool) -> None:
    """Before and after each file system step in turn, the folder still resumes from 5 or 10."""
    iteration = 5 if again else 10
    with pytest.MonkeyPatch.context() as monkeypatch:
        root = tmp_path / "count"
        save_checkpoint(root, 5, model(5.0), record(5))
        steps = interrupt(monkeypatch, -1, after=False)
        save_checkpoint(root, iteration, model(10.0), record(iteration))
    assert {"mkdir", "fsync", "rename", "replace", "append", "write_index"} <= set(steps)
    assert steps.index("rename") < len(steps) - 1 - steps[::-1].index("replace")
    found = []
    for number in range(len(steps)):
        for after in (False, True):
            root = tmp_path / f"{number}_{after}"
            save_checkpoint(root, 5, model(5.0), record(5))
            with pytest.MonkeyPatch.context() as monkeypatch:
                interrupt(monkeypatch, number, after)
                with pytest.raises((Killed, CheckpointError)):
                    save_checkpoint(root, iteration, model(10.0), record(iteration))
            path = find_checkpoint(root)
            assert path is not None
            found.append(value_in(path))
            if not again:
                assert path.name == (root / "latest").read_text().strip()
            # And the run goes on.
            save_checkpoint(root, 15, model(15.0), record(15))
            assert not any(name.startswith(("tmp_", "old_")) for name in names(root))
            assert value_in(root / "iter_0000015") == 15.0
    assert set(found) == {5.0, 10.0}
    assert found == sorted(found), "once the new checkpoint is current it stays so"


def test_a_rename_that_fails_gives_the_former_content_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 5, model(5.0), record(5))
    rename = os.rename

    def refuse_new(source: Path, target: Path) -> None:
        if source.name.startswith("tmp_") and target.name.startswith("iter_"):
            raise PermissionError(errno.EPERM, "not permitted")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_new)
    with pytest.raises(CheckpointError, match="PermissionError"):
        save_checkpoint(tmp_path, 5, model(6.0), record(5))
    assert names(tmp_path) == ["iter_0000005", "latest"]
    assert value_in(tmp_path / "iter_0000005") == 5.0


def test_a_kill_while_deleting_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2):
        save_checkpoint(tmp_path, iteration, model(iteration), record(iteration))

    def delete_one_file(directory: Path) -> None:
        next(directory.glob("*.distcp")).unlink()
        raise PermissionError(errno.EPERM, "not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", delete_one_file)
        save_checkpoint(tmp_path, 3, model(3), record(3), keep_last=1)
    assert [name for name in names(tmp_path) if name.startswith("iter_")] == ["iter_0000003"]
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000003"


def save_for_ever(root: str) -> None:
    for iteration in range(1, 1000):
        save_checkpoint(Path(root), iteration, model(float(iteration)), record(iteration))


def test_sigkill_while_saving(tmp_path: Path) -> None:
    """Real kills at arbitrary moments; the pointer always names a checkpoint that verifies."""
    context = multiprocessing.get_context("forkserver")
    for attempt in range(6):
        root = tmp_path / str(attempt)
        process = context.Process(target=save_for_ever, args=(str(root),))
        process.start()
        limit = time.monotonic() + PATIENCE_S
        while not (root / "latest").exists():
            assert process.is_alive() and time.monotonic() < limit
            time.sleep(0.001)
        time.sleep(0.004 * attempt)
        process.kill()
        process.join()
        path = find_checkpoint(root)
        assert path == root / (root / "latest").read_text().strip()
        assert value_in(path) == read_record(path).iteration


# -------------------------------------------------------------------- one rank fails, all fail


def save_failing(root: str, where: str, rank: int) -> str:
    """Fail on one rank in one step; return this rank's error."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    tensors: dict[str, Any] = model(10.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == rank:
            if where == "tensors":
                tensors["c"] = "text"
            elif where == "shape":
                tensors["a"] = torch.zeros(3)
            elif where == "dtype":
                tensors["a"] = tensors["a"].bfloat16()
            elif where == "write":
                monkeypatch.setattr(ShardFile, "append", fail)
            elif where == "sum":
                monkeypatch.setattr(ChecksumStream, "entry", fail)
            else:
                monkeypatch.setattr(save_module, where, fail)
        with pytest.raises(CheckpointError) as raised:
            save_checkpoint(Path(root), 10, tensors, record(10))
    return str(raised.value)


@pytest.mark.parametrize(
    ("where", "rank", "message"),
    [
        ("tensors", 1, "rank 1: c is str, expected a tensor"),
        ("shape", 1, "a is float32[64, 3] on rank 0 and float32[3] on rank 1"),
        ("dtype", 1, "a is float32[64, 3] on rank 0 and bfloat16[64, 3] on rank 1"),
        ("write", 1, "rank 1: OSError: [Errno 28] No space left on device"),
        ("write", 0, "rank 0: OSError: [Errno 28] No space left on device"),
        ("make_temporary", 0, "iter_0000010: OSError: [Errno 28]"),
        ("sum", 1, "rank 1: OSError: [Errno 28]"),
        ("sync_directory", 0, "iter_0000010: OSError: [Errno 28]"),
        ("write_atomically", 0, "iter_0000010: OSError: [Errno 28]"),
    ],
)
def test_one_rank_fails_all_fail(
    ranks: Ranks, tmp_path: Path, where: str, rank: int, message: str
) -> None:
    save_checkpoint(tmp_path, 5, model(5.0), record(5))
    arguments = {"root": str(tmp_path), "where": where, "rank": rank}
    first, second = ranks.run(save_failing, world_size=2, **arguments)
    assert first == second and message in first and "\n" not in first
    assert names(tmp_path) == ["iter_0000005", "latest"]
    found = find_checkpoint(tmp_path)
    assert found is not None and value_in(found) == 5.0


def save_partial_sums(root: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(Path(root), 1, {"grad": tensor}, record(1))
    return str(raised.value)


def test_partial_sums_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    messages = ranks.run(save_partial_sums, world_size=2, root=str(tmp_path))
    assert "grad is placed as (Partial(sum),)" in messages[0] and messages[0] == messages[1]


def test_nothing_to_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no rank holds any tensor"):
        save_checkpoint(tmp_path, 1, {}, record(1))
    with pytest.raises(CheckpointError, match="meta device"):
        save_checkpoint(tmp_path, 1, {"a": torch.empty(2, device="meta")}, record(1))
    assert find_checkpoint(tmp_path) is None


# ------------------------------------------------------------------- what others put in the folder


@pytest.mark.parametrize("name", ["tmp_iter_0000003.0123abcd", "old_iter_0000003.0123abcd"])
@pytest.mark.parametrize("kind", ["file", "link", "pipe"])
def test_leftovers_that_are_no_folders_do_not_keep_the_others(
    tmp_path: Path, name: str, kind: str
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    save_checkpoint(other, 1, model(1.0), record(1))
    save_checkpoint(root, 1, model(1.0), record(1))
    path = root / name
    make: dict[str, Callable[[], Any]] = {
        "file": path.touch,
        "link": lambda: path.symlink_to(other / "iter_0000001"),
        "pipe": lambda: os.mkfifo(path),
    }
    make[kind]()
    (root / "latest.0123abcd.tmp").touch()
    if name.startswith("old") and kind == "link":
        save_checkpoint(root, 3, model(3.0), record(3))
    save_checkpoint(root, 4, model(4.0), record(4), keep_last=1)
    assert names(root) == ["iter_0000004", "latest"]
    assert value_in(other / "iter_0000001") == 1.0


def test_one_that_cannot_be_deleted_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (1, 2, 3):
        save_checkpoint(tmp_path, iteration, model(1.0), record(iteration))
    set_aside = save_module.set_aside

    def failing(directory: Path) -> Path:
        if directory.name == "iter_0000003":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
        return set_aside(directory)

    monkeypatch.setattr(save_module, "set_aside", failing)
    save_checkpoint(tmp_path, 4, model(4.0), record(4), keep_last=1)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", "latest"]
    assert caplog.text.count("could not be deleted") == 1


def test_latest_as_a_folder_is_refused_before_anything_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="latest is a directory, expected a file; remove"):
        save_checkpoint(tmp_path, 5, model(5.0), record(5))
    assert names(tmp_path) == ["latest"]


def test_a_disk_that_fails_the_cleaning_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Read-only from now on: the save fails as any other, and the run does not end with it."""

    def read_only(*args: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(save_module, "commit", read_only)
    monkeypatch.setattr(save_module, "remove_directory", read_only)
    with pytest.raises(CheckpointError, match=r"iter_0000005: OSError: .*Read-only file system$"):
        save_checkpoint(tmp_path, 5, model(5.0), record(5))
    assert "is left for the next save to delete" in caplog.text


@pytest.mark.parametrize("size", ["8k", "16k", "40k"])
def test_a_full_disk_is_told_in_its_own_words(tmp_path: Path, size: str) -> None:
    """Not in those of torch's zip writer."""
    with small_disk(tmp_path / "disk", size) as disk:
        tensors = {f"t{number}": torch.ones(3000) for number in range(5)}
        with pytest.raises(CheckpointError, match="No space left on device"):
            save_checkpoint(disk, 5, tensors, record(5))
        assert names(disk) == []
