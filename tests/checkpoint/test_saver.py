"""Saves beside training hold the moment they were asked for, one at a time, and never raise."""

import errno
import fcntl
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megafp8.checkpoint.save as save_module
import megafp8.checkpoint.writer as writer
from megafp8.checkpoint import Saver, find_checkpoint, load_tensors, save_checkpoint
from megafp8.checkpoint.files import is_being_read, reading
from megafp8.checkpoint.writer import ShardFile
from megafp8.errors import CheckpointError
from tests.checkpoint.sharded import build, differing, record
from tests.checkpoint.test_save_faults import model, names, value_in
from tests.model.small import one_rank  # noqa: F401
from tests.support.ranks import Ranks

Reports = list[tuple[int, Path | None, CheckpointError | None]]


def saver(reports: Reports) -> Saver:
    return Saver(background=True, report=lambda *report: reports.append(report))


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no shard be written before the event is set."""
    go, write = threading.Event(), ShardFile.append

    def held(self: ShardFile, *args: Any) -> Any:
        assert go.wait(30.0)
        return write(self, *args)

    monkeypatch.setattr(ShardFile, "append", held)
    return go


def test_what_is_saved_is_the_state_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: Reports = []
    go, background = hold_writes(monkeypatch), saver(reports)
    tensors = model(5.0)
    background.save(tmp_path, 5, tensors, record(5))
    for tensor in tensors.values():
        tensor.fill_(6.0)  # training goes on
    background.poll()
    assert reports == [] and find_checkpoint(tmp_path) is None
    assert background.wait(0.01) is False
    go.set()
    assert background.wait() is True
    assert reports == [(5, tmp_path / "iter_0000005", None)]
    assert value_in(tmp_path / "iter_0000005") == 5.0
    background.save(tmp_path, 6, tensors, record(6))  # into the same host memory
    background.wait()
    assert value_in(tmp_path / "iter_0000006") == 6.0
    assert value_in(tmp_path / "iter_0000005") == 5.0


def test_the_next_save_waits_for_the_one_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: Reports = []
    go, background = hold_writes(monkeypatch), saver(reports)
    background.save(tmp_path, 5, model(5.0), record(5))
    second = threading.Thread(target=background.save, args=(tmp_path, 6, model(6.0), record(6)))
    second.start()
    second.join(0.1)
    assert second.is_alive() and reports == []
    go.set()
    second.join()
    background.wait()
    assert [report[0] for report in reports] == [5, 6]
    assert value_in(tmp_path / "iter_0000005") == 5.0
    assert value_in(tmp_path / "iter_0000006") == 6.0


def test_a_failure_is_reported_and_the_next_save_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: Reports = []
    background = saver(reports)
    background.save(tmp_path, 5, model(5.0), record(5))
    background.wait()

    def fail(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "append", fail)
        background.save(tmp_path, 6, model(6.0), record(6))
        background.wait()
    assert background.last_error is not None and reports[-1][1] is None
    assert "No space left on device" in str(reports[-1][2])
    assert names(tmp_path) == ["iter_0000005", "latest"]
    background.save(tmp_path, 7, model(7.0), record(7))
    background.wait()
    assert background.last_error is None and value_in(tmp_path / "iter_0000007") == 7.0


@pytest.mark.parametrize("background", [False, True])
def test_a_state_that_cannot_be_saved_is_reported_too(tmp_path: Path, background: bool) -> None:
    reports: Reports = []
    broken: dict[str, Any] = {**model(1.0), "c": "text"}
    one = Saver(background=background, report=lambda *report: reports.append(report))
    one.save(tmp_path, 5, broken, record(5))
    one.wait()
    assert "c is str, expected a tensor" in str(reports[0][2])
    assert find_checkpoint(tmp_path) is None


def save_while_training(root: str) -> tuple[list[float], list[str], bool]:
    """Saves in flight beside many small collectives of the default group."""
    reports: Reports = []
    background = saver(reports)
    tensors = build(1, dist.get_world_size())
    sums, met = [], False
    for iteration in (1, 2, 3):
        background.save(Path(root), iteration, tensors, record(iteration), keep_last=2)
        for number in range(50):
            value = torch.ones(1) * number
            dist.all_reduce(value)
            sums.append(value.item())
            met = met or not (background.poll() or len(reports) >= iteration)
    background.wait()
    assert [report[2] for report in reports] == [None] * 3, reports
    blank = build(1, dist.get_world_size(), blank=True)
    assert load_tensors(Path(root) / "iter_0000003", blank) == []
    return sums, differing(blank), met


def test_the_writers_collectives_do_not_meet_trainings(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(save_while_training, world_size=4, root=str(tmp_path))
    for sums, wrong, met in results:
        assert sums == [4.0 * number for number in range(50)] * 3
        assert wrong == [] and met, "no save was in flight during training"
    assert names(tmp_path) == ["iter_0000002", "iter_0000003", "latest"]


def one_rank_cannot_stage(root: str) -> str:
    reports: Reports = []
    background = saver(reports)
    tensors: dict[str, Tensor] = model(5.0)
    if dist.get_rank() == 1:
        tensors["b"] = torch.empty(5, device="meta")
    background.save(Path(root), 5, tensors, record(5))
    assert background.wait(20.0)
    return str(reports[0][2])


def test_one_rank_fails_all_hear_of_it(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(one_rank_cannot_stage, world_size=2, root=str(tmp_path))
    assert first == second and "rank 1: b is on the meta device" in first
    assert find_checkpoint(tmp_path) is None


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("background", [False, True])
def test_a_save_has_a_time_limit_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    limits = []
    gather = dist.all_gather_object

    def noted(*arguments: Any, group: Any = None) -> None:
        limits.append(group._get_backend(torch.device("cpu")).options._timeout)
        gather(*arguments, group=group)

    monkeypatch.setattr("megafp8.checkpoint.agree.rank_and_size", lambda group: (0, 2))
    monkeypatch.setattr(dist, "all_gather_object", noted)
    reports: Reports = []
    limit = timedelta(minutes=17)
    one = Saver(background=background, timeout=limit, report=lambda *report: reports.append(report))
    one.save(tmp_path, 5, model(5.0), record(5))
    one.wait()
    assert limits and set(limits) == {limit}


def test_where_an_exclusive_lock_needs_a_writable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which makes `flock` from locks of byte ranges."""
    flock = fcntl.flock

    def of_nfs(descriptor: int, operation: int) -> None:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if operation & fcntl.LOCK_EX and mode == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    path = save_checkpoint(tmp_path, 1, model(1.0), record(1))
    assert not is_being_read(path)
    with reading(path):
        assert is_being_read(path)
    assert not is_being_read(path)


def test_keep_last_spares_what_is_being_loaded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, model(1.0), record(1))
    with reading(tmp_path / "iter_0000001"):
        save_checkpoint(tmp_path, 2, model(2.0), record(2), keep_last=1)
        assert names(tmp_path) == ["iter_0000001", "iter_0000002", "latest"]
        assert value_in(tmp_path / "iter_0000001") == 1.0
    save_checkpoint(tmp_path, 3, model(3.0), record(3), keep_last=1)
    assert names(tmp_path) == ["iter_0000003", "latest"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("step", ["stage", "plan_shards", "append", "crc32", "write_index"])
def test_an_interrupt_inside_a_save_is_no_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Training would go on after Ctrl-C."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    places = {"append": ShardFile, "crc32": writer}  # torch's zip writer calls the latter from C++
    monkeypatch.setattr(places.get(step, save_module), step, interrupted)
    reports: list[object] = []
    saver = Saver(report=lambda *report: reports.append(report))
    with pytest.raises(KeyboardInterrupt):
        saver.save(tmp_path, 5, {"a": torch.ones(3)}, record(5))
    assert reports == [] and find_checkpoint(tmp_path) is None
