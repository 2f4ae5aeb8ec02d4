"""Whole runs of one rank whose disk, folder or checkpoint is bad."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint import load_tensors, read_record
from megafp8.checkpoint.metadata import read_metadata
from megafp8.errors import CheckpointError
from tests.support.disks import remount, small_disk
from tests.support.launches import TINY, Run, launched, train
from tests.tools.kill_runs import check_folder

SAMPLE = Path(__file__).parent / "samples" / "version_1" / "iter_0000003"
# Of the run that the sample was taken from, which went on to iteration 6 on two ranks.
SAMPLE_LOSSES = [3.806640625, 3.7652297019958496, 3.74764347076416]


def command(folder: Path, *more: str) -> list[str]:
    return [*TINY, "--run-dir", str(folder), *more]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def failed(argv: list[str], folder: Path, code: int = 2) -> Run:
    with launched(1, argv, folder / "logs") as run:
        assert run.wait() == [code], run.text()
    return run


# ------------------------------------------------------------------------------ bad checkpoints


def truncate(root: Path) -> str:
    content = (root / "__1_0.distcp").read_bytes()
    (root / "__1_0.distcp").write_bytes(content[: len(content) // 2])
    return "__1_0.distcp has"


def empty(root: Path) -> str:
    (root / "__0_0.distcp").write_bytes(b"")
    return "__0_0.distcp has 0 bytes"


def flip(root: Path) -> str:
    content = bytearray((root / "__1_0.distcp").read_bytes())
    content[len(content) // 3] ^= 4
    (root / "__1_0.distcp").write_bytes(content)
    return "__1_0.distcp is damaged: crc32"


def swap(root: Path) -> str:
    (root / "__0_0.distcp").rename(root / "aside")
    (root / "__1_0.distcp").rename(root / "__0_0.distcp")
    (root / "aside").rename(root / "__1_0.distcp")
    return ".distcp has"


def remove(root: Path) -> str:
    (root / "__0_0.distcp").unlink()
    return "__0_0.distcp is missing"


def add(root: Path) -> str:
    shutil.copy(root / "__0_0.distcp", root / "__2_0.distcp")
    return "__2_0.distcp is no file of this checkpoint"


def two_checkpoints(folder: Path) -> Path:
    root = folder / "checkpoints"
    for name in ("iter_0000003", "iter_0000006"):
        shutil.copytree(SAMPLE, root / name)
    (root / "latest").write_text("iter_0000006\n")
    return root


@pytest.mark.parametrize("damage", [truncate, empty, flip, swap, remove, add])
def test_damage_is_found_by_a_load(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    """The file is named, and the command for the older checkpoint that is good."""
    root = two_checkpoints(tmp_path)
    record = read_record(root / "iter_0000006")
    tensors = {
        name: torch.full(entry.shape, -1, dtype=getattr(torch, entry.dtype))
        for name, entry in record.tensors.items()
    }
    message = damage(root / "iter_0000006")
    with pytest.raises(CheckpointError) as raised:
        load_tensors(root / "iter_0000006", tensors)
    text = str(raised.value)
    assert message in text and "\n" not in text and raised.value.exit_code == 2
    assert str(root / "iter_0000006") in text
    assert f"use --load {root / 'iter_0000003'} instead" in text
    if damage is not flip:  # wrong bytes in a shard of the right size are found by reading it
        assert all(bool((tensor == -1).all()) for tensor in tensors.values())


def test_damage_ends_a_run_before_training(tmp_path: Path) -> None:
    root = two_checkpoints(tmp_path)
    message = flip(root / "iter_0000006")
    words = ["--run-dir", str(tmp_path), "--load", str(root), "--use-checkpoint-args"]
    run = failed([*TINY[TINY.index("--mock-data") :], *words, "--train-iters", "9"], tmp_path)
    line = run.output(0).strip().splitlines()[-1]
    assert line.startswith("pretrain_gpt.py: error: ") and message in line, run.text()
    assert f"use --load {root / 'iter_0000003'} instead" in line
    assert not (tmp_path / "metrics.jsonl").exists()
    assert {path.name for path in root.iterdir()} == {"iter_0000003", "iter_0000006", "latest"}


# -------------------------------------------------------------------------------------- old age


def test_a_checkpoint_of_format_version_1_still_goes_on(tmp_path: Path) -> None:
    """Written at tp 2 by the first version; on one rank the losses are those of two."""
    argv = command(tmp_path, "--load", str(SAMPLE), "--use-checkpoint-args", "--train-iters", "6")
    train(1, argv[argv.index("--mock-data") :], tmp_path / "logs")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [4, 5, 6]
    assert [row["loss"] for row in rows] == pytest.approx(SAMPLE_LOSSES, rel=2e-3)
    assert [row["consumed_samples"] for row in rows] == [16, 20, 24]
    (resume,) = events(tmp_path, "resume")
    assert (resume["iteration"], resume["action"]) == (3, "continue")
    assert resume["data_position"] == {"consumed_samples": 12}
    assert resume["checkpoint_before"] == str(SAMPLE)
    assert (resume["layout_before"]["tp"], resume["layout_after"]["tp"]) == (2, 1)
    counts = resume["tensors"]
    record = read_record(SAMPLE)
    sizes = {name: entry.size for name, entry in record.files.items()}
    stored = read_metadata(SAMPLE, sizes).state_dict_metadata.values()
    # On one rank, what lies in parts is what two tensor-parallel ranks had cut.
    cut = sum(len(tensor.chunks) > 1 for tensor in stored)  # type: ignore[union-attr]
    assert counts["loaded"] == len(record.tensors) > counts["remapped"] == cut > 0
    assert counts["defaulted"] == counts["dropped"] == 0
    assert len(resume["scale_state_sha256"]) == 64
    (save,) = events(tmp_path, "save")
    assert save["checkpoint_after"] == str(tmp_path / "checkpoints" / "iter_0000006")


# ------------------------------------------------------------------------------------ bad disks


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path, None, None]:
    """A file system that one checkpoint fits into and two do not."""
    with small_disk(tmp_path / "disk", "400k") as folder:
        yield folder


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tmp_path: Path, disk: Path, asynchronous: bool
) -> None:
    more = ["--async-save"] if asynchronous else []
    argv = command(tmp_path, "--save", str(disk), "--train-iters", "4", *more)
    run = failed([*argv, "--save-interval", "2"], tmp_path, code=1)
    output = run.output(0)
    assert "SAVE FAILED at iteration 4" in output and "No space left on device" in output
    assert "iteration 4 is not saved" in output.strip().splitlines()[-1]
    assert "Traceback" not in output and "iteration        4/" in output
    assert sorted(path.name for path in disk.iterdir()) == ["iter_0000002", "latest"]
    alarms = events(tmp_path, "save_failed")
    assert alarms and all(row["level"] == "error" for row in alarms)
    assert alarms[-1]["checkpoint_before"] == str(disk / "iter_0000002")
    # With room for it, the same command ends well.
    argv = [*argv, "--load", str(disk), "--keep-last", "1"]
    remount(disk, "size=2m")
    train(1, argv, tmp_path / "again")
    assert (disk / "latest").read_text() == "iter_0000004\n"


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))
    return path


def test_a_disk_that_is_full_for_a_while_costs_the_saves_of_that_while(
    tmp_path: Path, disk: Path
) -> None:
    """Everything of the run lies on it: metrics, audit log, lock, the save that is under way."""
    remount(disk, "size=8m")
    folder = disk / "run"
    argv = command(folder, "--train-iters", "60", "--save-interval", "5", "--async-save")
    patch = "tests.support.faults:slow_steps", {"seconds": 0.05}
    with launched(1, [*argv, "--keep-last", "2"], tmp_path / "logs", patch) as run:
        run.wait_for("saved ")
        filler = fill(disk)
        run.wait_for("SAVE FAILED")
        before = check_folder(folder)
        assert before >= 5 and not list((folder / "checkpoints").glob("tmp_*")), run.text()
        filler.unlink()
        run.wait_for("is written again; 0 lines are lost")
        assert run.wait() == [0], run.text()
    output = run.output(0)
    assert "SAVE FAILED" in output and "No space left on device" in output
    # TensorBoard's own thread shows one of its own, and is off from then on.
    assert "[rank 0] Traceback" not in output and output.count("TensorBoard is off") <= 1
    assert check_folder(folder) == 60
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"iter_0000055", "iter_0000060", "latest"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 61))
    failures = events(folder, "save_failed")
    assert failures and failures[0]["checkpoint_before"].endswith(f"{before:07d}")


def test_a_folder_that_turns_read_only(tmp_path: Path) -> None:
    """As after an error of its disk; the open lock keeps `mount` from doing it."""
    argv = command(tmp_path, "--save", str(tmp_path / "disk"), "--train-iters", "60")
    patch = "tests.support.faults:read_only_after", {"saves": 1}
    with launched(1, [*argv, "--save-interval", "20"], tmp_path / "logs", patch) as run:
        assert run.wait() == [1], run.text()
    output = run.output(0)
    assert "SAVE FAILED" in output and "Read-only file system" in output
    assert "iteration       60/" in output, "training went on"
    last = output.strip().splitlines()[-1]
    assert last.startswith("pretrain_gpt.py: error: iteration 60 is not saved") and (
        "iter_0000020: saving" in last and "Traceback" not in output
    ), last
    assert events(tmp_path, "save_failed")


# ------------------------------------------------------------------------------------- two jobs


def test_a_job_starts_from_a_folder_where_another_one_keeps_only_its_newest(
    tmp_path: Path,
) -> None:
    """The other one saves many times while this one builds its model, and deletes what is older."""
    root = tmp_path / "a" / "checkpoints"
    argv = command(tmp_path / "a", "--load", str(root), "--train-iters", "9999")
    argv += ["--save-interval", "1", "--keep-last", "1"]
    slow = "tests.support.faults:slow_steps", {"seconds": 0.05}
    late = "tests.support.faults:slow_model", {"seconds": 1.0}
    with launched(1, argv, tmp_path / "first", slow) as first:
        first.wait_for("saved ")
        second = command(tmp_path / "b", "--load", str(root), "--train-iters", "9999")
        second += ["--exit-interval", "1"]
        with launched(1, second, tmp_path / "second", late) as other:
            assert other.wait() == [0], other.text()
        (resume,) = events(tmp_path / "b", "resume")
        kept = f"{resume['checkpoint_before']} is being loaded by another process: kept for now"
        assert kept in first.output(0)
        first.signal(signal.SIGTERM)
        assert first.wait() == [75], first.text()
    (left,) = root.glob("iter_*")
    # What a job has loaded itself it no longer keeps.
    train(1, [*argv, "--exit-interval", "1"], tmp_path / "again")
    (newer,) = root.glob("iter_*")
    assert newer.name > left.name


def test_the_second_job_in_a_folder_is_refused(tmp_path: Path) -> None:
    argv = command(tmp_path, "--load", str(tmp_path / "checkpoints"), "--train-iters", "40")
    argv += ["--save-interval", "2"]
    patch = "tests.support.faults:slow_steps", {"seconds": 0.5}
    with launched(1, argv, tmp_path / "first", patch) as first:
        first.wait_for("saved ")
        second = failed(argv, tmp_path / "second")
        line = second.output(0).strip().splitlines()[-1]
        assert "is in use by another job" in line and str(first.processes[0].pid) in line
        assert first.processes[0].is_alive()
        reached = first.output(0).count("iteration  ")
        first.kill()
    assert reached >= 2 and check_folder(tmp_path) >= 2
    assert os.path.exists(tmp_path / "checkpoints" / ".lock")
    # It was killed and could not give its lock back: the next one is not refused for that.
    argv[argv.index("40")] = str(check_folder(tmp_path) + 1)
    train(1, argv, tmp_path / "third")
    assert not os.path.exists(tmp_path / "checkpoints" / ".lock")


def test_a_job_whose_folder_was_taken_over_saves_nothing_more(tmp_path: Path) -> None:
    argv = command(tmp_path, "--train-iters", "300", "--save-interval", "2")
    lock = tmp_path / "checkpoints" / ".lock"
    other = {"token": "f" * 16, "host": "node7", "pid": 99, "since": "x"}
    patch = "tests.support.faults:slow_steps", {"seconds": 0.05}
    with launched(1, argv, tmp_path / "logs", patch) as run:
        run.wait_for("saved ")
        while lock.exists() and json.loads(lock.read_text())["pid"] != 99:
            lock.write_text(json.dumps(other))
        run.wait_for("SAVE FAILED")
        before = check_folder(tmp_path)
        run.signal(signal.SIGTERM)
        assert run.wait() == [1], run.text()
    last = run.output(0).strip().splitlines()[-1]
    assert "is not saved" in last and "by process 99 on node7" in last and lock.exists()
    assert check_folder(tmp_path) == before
