"""The offline tools on bad disks, and killed or interrupted: the source stays, no half is taken."""

import errno
import fcntl
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

import megafp8.checkpoint.save as saves
from megafp8.checkpoint import find_checkpoint, read_record, verify_files
from megafp8.command.ending import run_tool
from megafp8.convert.run import ConvertOptions, convert
from megafp8.errors import CheckpointError
from tests.checkpoint.made import make_source
from tests.checkpoint.tool_runs import TOOLS, for_ever, interrupted, reshard
from tests.convert.hand_made import make_folder
from tests.support.disks import remount, small_disk
from tests.support.limits import PATIENCE_S, slow

KILLS = 3


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    hf = make_folder(root / "hf")
    return {name: hf for name in TOOLS} | {"reshard": make_source(root / "ours", tied=True)}


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path, None, None]:
    with small_disk(tmp_path / "disk", "8m") as folder:
        yield folder


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_a_full_disk(disk: Path, sources: dict[str, Path], tool: str) -> None:
    """With room for nothing, for a part of it, and at last for all."""
    before = digests(sources[tool])
    TOOLS[tool](sources[tool], disk / "sized")
    size = sum(path.stat().st_size for path in (disk / "sized").rglob("*"))
    for share in (0.0, 0.3, 0.6):
        filler, room = disk / "filler", int(share * size)
        space = os.statvfs(disk)
        filler.write_bytes(b"x" * max(0, space.f_bavail * space.f_bsize - room))
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            TOOLS[tool](sources[tool], disk / "deep" / "out")
        assert "\n" not in str(caught.value) and str(disk) in str(caught.value)
        filler.unlink()
        assert [path.name for path in disk.iterdir()] == ["sized"], share
    TOOLS[tool](sources[tool], disk / "deep" / "out")
    assert digests(sources[tool]) == before


@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
def test_a_disk_that_fails_at_the_last_name_leaves_nothing(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """`latest` comes after the rename: by then the checkpoint has its name already."""
    root = tmp_path / "out"
    root.mkdir()
    (root / "latest").write_text("iter_0000003\n")
    write = saves.write_atomically

    def fail(path: Path, text: str) -> None:
        if path.name != "latest":
            return write(path, text)
        if written:
            write(path, text)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saves, "write_atomically", fail)
    with pytest.raises(CheckpointError, match="No space left on device; nothing is left$"):
        reshard(sources["reshard"], root)
    assert [path.name for path in root.iterdir()] == ["latest"]
    assert (root / "latest").read_text() == "iter_0000003\n"
    with pytest.raises(CheckpointError, match="nothing is left$"):
        reshard(sources["reshard"], tmp_path / "fresh")
    assert not (tmp_path / "fresh").exists()


@pytest.mark.parametrize("tool", ["reshard", "to_hf"])
def test_a_read_only_disk(disk: Path, sources: dict[str, Path], tool: str) -> None:
    remount(disk, "ro")
    with pytest.raises(CheckpointError, match="Read-only file system") as caught:
        TOOLS[tool](sources[tool], disk / "out")
    assert "\n" not in str(caught.value)


def test_a_target_that_cannot_be_made(tmp_path: Path, sources: dict[str, Path]) -> None:
    (tmp_path / "file").write_text("x")
    for tool, match in (("reshard", "Not a directory"), ("to_hf", "file: (Not a dir|File exists)")):
        with pytest.raises(CheckpointError, match=match):
            TOOLS[tool](sources[tool], tmp_path / "file" / "out")
    source = sources["reshard"]
    for save in (source / "inside", source / "a" / "b"):
        with pytest.raises(CheckpointError, match="lies inside the checkpoint"):
            reshard(source, save)
    assert (tmp_path / "file").read_text() == "x" and not (source / "inside").exists()


def test_errors_of_the_system_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def unreadable() -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", "some/file")

    assert run_tool(unreadable) == 2
    assert capsys.readouterr().err == "error: some/file: Permission denied\n"


def test_a_reader_that_has_seen_enough() -> None:
    """`tool | head -1` is no failure of the tool, and no traceback."""
    work = "run_tool(lambda: ['x' * 70] * 100_000)"
    code = f"import sys; from megafp8.command.ending import run_tool; sys.exit({work})"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"x" * 70 + b"\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60.0)) == (b"", 0)


# ---------------------------------------------------------------------------------------- killed


def started(function: Callable[..., None], *args: Any) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.checkpoint.tool_runs"])
    process = context.Process(target=function, args=args)
    process.start()
    return process


def wait_for(path: Path, process: Any) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert process.is_alive() and time.monotonic() < limit, path
        time.sleep(0.001)


def check_whole(tool: str, out: Path) -> None:
    """What stands under the target's name is complete."""
    if tool == "to_hf":
        convert(ConvertOptions("hf", "hf", out, out.with_name("again")))
        return
    checkpoint = find_checkpoint(out)
    assert checkpoint is not None
    verify_files(checkpoint, read_record(checkpoint))


@pytest.mark.parametrize("tool", ["reshard", "to_hf", slow("to_native")])
def test_sigkill_at_any_moment(tmp_path: Path, sources: dict[str, Path], tool: str) -> None:
    source, before = sources[tool], digests(sources[tool])
    chance, inside = random.Random(5), 0
    for attempt in range(KILLS):
        root = tmp_path / str(attempt)
        process = started(for_ever, tool, str(source), str(root))
        wait_for(root / "0" / "out", process)
        time.sleep(chance.uniform(0.0, 0.3))
        process.kill()
        process.join()
        for folder in root.iterdir():
            out = folder / "out"
            final = out if tool != "reshard" else out / source.name
            if final.exists():
                check_whole(tool, out)
                continue
            inside += 1
            # Nothing there that `--load` would take, and the same command ends well.
            assert not out.is_dir() or find_checkpoint(out) is None
            TOOLS[tool](source, out)
            check_whole(tool, out)
            left = {path.name for path in folder.iterdir()} - {"out", "again"}
            assert not left, "a killed one's files are cleared by the next"
            assert not any(path.name.startswith(("tmp_", ".")) for path in out.iterdir())
    assert inside > 0
    assert digests(source) == before


def test_a_living_conversion_s_folder_is_left_alone(
    tmp_path: Path, sources: dict[str, Path]
) -> None:
    other = tmp_path / ".out.0123abcd.partial"
    (other / "deep").mkdir(parents=True)
    descriptor = os.open(other, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    TOOLS["to_hf"](sources["to_hf"], tmp_path / "out")
    assert (other / "deep").is_dir()
    os.close(descriptor)  # as the end of its process does
    shutil.rmtree(tmp_path / "out")
    TOOLS["to_hf"](sources["to_hf"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ----------------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize(
    ("tool", "number", "code", "words"),
    [
        ("reshard", signal.SIGINT, 130, "interrupted"),
        ("to_hf", signal.SIGINT, 130, "interrupted"),
        ("reshard", signal.SIGTERM, 143, "ended by SIGTERM"),
        ("to_hf", signal.SIGTERM, 143, "ended by SIGTERM"),
        ("to_native", signal.SIGHUP, 129, "ended by SIGHUP"),
    ],
)
def test_an_ending_signal_is_one_line(
    tmp_path: Path, sources: dict[str, Path], tool: str, number: int, code: int, words: str
) -> None:
    output, save = tmp_path / "output", tmp_path / "deep" / "out"
    output.mkdir()
    process = started(interrupted, tool, str(sources[tool]), str(save), str(output))
    wait_for(output / "verifying", process)
    for _ in range(1 if number == signal.SIGINT else 2):  # `timeout` sends its own twice
        os.kill(process.pid, number)
    process.join(30.0)
    assert process.exitcode == code
    lines = (output / "text").read_text().splitlines()
    assert lines == [f"error: {words}; nothing was written"]
    assert [path.name for path in tmp_path.iterdir()] == ["output"]
