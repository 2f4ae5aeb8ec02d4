"""TensorBoard and W&B: what they are given, and that no failure of theirs reaches the training."""

import logging
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megafp8.config.logging import LoggingConfig
from megafp8.train import trackers
from megafp8.train.metrics import IterationMetrics
from megafp8.train.trackers import (
    Patience,
    build_trackers,
    tensorboard_tracker,
    wandb_tracker,
)
from tests.support.limits import PATIENCE_S


def metrics(iteration, **changes):
    values = {
        "iteration": iteration, "loss": 2.5, "grad_norm": 1.25, "lr": 3e-4, "tokens": 512,
        "consumed_samples": 8 * iteration, "step_time_s": 0.25, "tokens_per_s": 2048.0,
        "tflops_per_device": None, "mfu": None, "mem_peak_bytes": None, "skipped": False,
        "comm_bytes": {"loss": {"float32": 8}, "pp_p2p": {"bfloat16": 16, "uint8": 4}},
        "global_batch_size": 8,
    }  # fmt: skip
    return IterationMetrics(**{**values, **changes})


class FakeWandb(SimpleNamespace):
    """Stands in for the package: records what it is given, and fails where it is told to."""

    def __init__(self, fail_at=""):
        super().__init__(opened=[], logged=[], finished=0, fail_at=fail_at)

    def _may_fail(self, place):
        if place == self.fail_at:
            raise ConnectionError("no route\nto host")

    def init(self, **arguments):
        self._may_fail("init")
        self.opened.append(arguments)
        return self

    def log(self, values, step):
        self._may_fail("log")
        self.logged.append((step, values))

    def finish(self):
        self._may_fail("finish")
        self.finished += 1


@pytest.fixture
def warnings_of(caplog, monkeypatch):
    # caplog listens at the root; log.configure, where another test called it, cuts that off.
    monkeypatch.setattr(logging.getLogger("megafp8"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_tensorboard_gets_megatrons_names(tmp_path):
    tracker = tensorboard_tracker(tmp_path)
    tracker.observe(metrics(1))
    tracker.observe(metrics(2, loss=2.0, valid_loss=2.25))
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"lm loss", "lm loss validation", "learning-rate", "grad-norm", "batch-size"} <= tags
    assert "throughput" not in tags  # None is not a point
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(1, 2.5), (2, 2)]
    assert events.Scalars("communication-bytes")[0].value == 28


def test_tensorboard_hides_what_a_fresh_start_repeats(tmp_path):
    for value in (1.0, 2.0):
        tracker = tensorboard_tracker(tmp_path)
        for iteration in range(1, 4 - int(value)):
            tracker.observe(metrics(iteration, loss=value))
        tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [(1, 2.0)]


def test_tensorboard_hides_what_a_resumed_run_repeats(tmp_path):
    first = tensorboard_tracker(tmp_path)
    for iteration in (1, 2, 3):
        first.observe(metrics(iteration, loss=1.0))
    first.close()
    second = tensorboard_tracker(tmp_path, resumed_iteration=2)
    second.observe(metrics(3, loss=5.0))
    second.close()
    # Both files may carry the same second in their names; the purge is what orders them.
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("lm loss")] == [
        (1, 1.0), (2, 1.0), (3, 5.0),
    ]  # fmt: skip


def test_wandb_continues_the_run_that_the_folder_belongs_to(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for iteration in (1, 2):
        tracker = wandb_tracker(tmp_path, "project", "name", {"lr": 0.1})
        tracker.observe(metrics(iteration))
        tracker.close()
        tracker.close()
    first, second = fake.opened
    stored = (tmp_path / "wandb_run_id").read_text().strip()
    assert first == second and first["id"] == stored and len(stored) == 8
    assert (first["project"], first["name"], first["resume"]) == ("project", "name", "allow")
    assert first["dir"] == str(tmp_path) and first["config"] == {"lr": 0.1}
    assert [step for step, _ in fake.logged] == [1, 2]
    assert fake.logged[0][1]["lm loss"] == 2.5
    assert fake.finished == 2


@pytest.mark.parametrize("fail_at", ["init", "log", "finish"])
def test_a_failing_wandb_is_one_warning_and_no_more(tmp_path, monkeypatch, warnings_of, fail_at):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fail_at))
    tracker = wandb_tracker(tmp_path, "project", None, {})
    for iteration in (1, 2, 3):
        tracker.observe(metrics(iteration))
    tracker.close()
    assert not tracker.active
    assert warnings_of() == [
        "Weights & Biases is off: ConnectionError: no route; "
        "training goes on, metrics.jsonl has the numbers"
    ]


class HangingWandb(FakeWandb):
    """Never comes back from the place that it is told, as behind a proxy that is dead."""

    def __init__(self, hang_at):
        super().__init__()
        self.hang_at, self.end = hang_at, threading.Event()

    def _may_fail(self, place):
        if place == self.hang_at:
            self.end.wait(PATIENCE_S)

    def init(self, **arguments):
        if arguments.get("mode") != "offline":
            self._may_fail("init")
        self.opened.append(arguments)
        return self


@pytest.fixture
def hanging(monkeypatch):
    fakes = []

    def plant(hang_at):
        fakes.append(HangingWandb(hang_at))
        monkeypatch.setitem(sys.modules, "wandb", fakes[-1])
        return fakes[-1]

    yield plant
    for fake in fakes:
        fake.end.set()


def test_a_service_that_does_not_answer_is_replaced_by_files(
    tmp_path, hanging, warnings_of, monkeypatch
):
    monkeypatch.setattr(trackers, "START_SECONDS", 0.2)
    fake = hanging("init")
    began = time.monotonic()
    tracker = wandb_tracker(tmp_path, "project", None, {})
    for iteration in (1, 2, 3):
        tracker.observe(metrics(iteration))
    assert time.monotonic() - began < 10.0 and tracker.active
    tracker.close()
    assert [arguments.get("mode") for arguments in fake.opened] == ["offline"]
    assert [step for step, _ in fake.logged] == [1, 2, 3] and fake.finished == 1
    assert warnings_of() == ["Weights & Biases goes on offline: no answer within 0.2 s"]
    fake.end.set()  # the service answers after all: it is not the run's any more
    limit = time.monotonic() + PATIENCE_S
    while fake.finished < 2:
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert len(fake.logged) == 3


def test_a_service_that_refuses_is_replaced_by_files(tmp_path, monkeypatch, warnings_of):
    fake = FakeWandb()

    def init(**arguments):
        if "mode" not in arguments:
            raise ConnectionError("no route")
        return FakeWandb.init(fake, **arguments)

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = wandb_tracker(tmp_path, "project", None, {})
    tracker.observe(metrics(1))
    tracker.close()
    assert [step for step, _ in fake.logged] == [1]
    assert warnings_of() == ["Weights & Biases goes on offline: ConnectionError: no route"]


@pytest.mark.parametrize("hang_at", ["log", "finish"])
def test_a_tracker_that_hangs_later_costs_the_end_some_seconds(
    tmp_path, hanging, warnings_of, hang_at
):
    hanging(hang_at)
    patience = Patience(0.5)
    tracker = wandb_tracker(tmp_path, "project", None, {}, patience)
    began = time.monotonic()
    for iteration in range(1, 1500):
        tracker.observe(metrics(iteration))
    tracker.close()
    tracker.close()
    assert time.monotonic() - began < 30.0 and patience.seconds <= 0.0
    *before, last = warnings_of()
    assert last.startswith("Weights & Biases does not answer and is left alone; it lacks ")
    if hang_at == "log":
        (told,) = before  # once, of about 500 that found no room
        assert "it gets no points from iteration 100" in told


def test_trackers_share_the_time_at_the_end():
    patience, never = Patience(0.3), threading.Event()
    assert not patience.wait(never) and patience.seconds <= 0.0
    began = time.monotonic()
    assert not patience.wait(never) and time.monotonic() - began < 0.3


def test_tensorboard_on_a_file_system_that_hangs(tmp_path, monkeypatch, warnings_of):
    """As a mount whose server is gone: the call that makes the folder never returns."""
    end, makedirs = threading.Event(), os.makedirs

    def hang(path, *arguments, **keywords):
        if "dead" in str(path):
            end.wait(PATIENCE_S)
        return makedirs(path, *arguments, **keywords)

    monkeypatch.setattr(os, "makedirs", hang)
    monkeypatch.setattr(trackers, "START_SECONDS", 0.1)
    began = time.monotonic()
    tracker = tensorboard_tracker(tmp_path / "dead" / "tensorboard", patience=Patience(0.5))
    tracker.observe(metrics(1))
    tracker.close()
    assert time.monotonic() - began < 30.0
    assert warnings_of() == [
        "TensorBoard: no answer within 0.1 s; its points wait, training goes on",
        "TensorBoard does not answer and is left alone; it lacks 1 points or more, "
        "metrics.jsonl has all",
    ]
    end.set()


def test_an_absent_wandb_is_one_warning(tmp_path, monkeypatch, warnings_of):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes the import fail
    tracker = wandb_tracker(tmp_path, "project", None, {})
    tracker.observe(metrics(1))
    tracker.close()
    (message,) = warnings_of()
    assert message.startswith("Weights & Biases is off: ModuleNotFoundError")


def test_an_unwritable_tensorboard_folder_is_one_warning(tmp_path, warnings_of):
    (tmp_path / "file").write_text("in the way")
    tracker = tensorboard_tracker(tmp_path / "file" / "tensorboard")
    tracker.observe(metrics(1))
    tracker.close()
    (message,) = warnings_of()
    assert message.startswith("TensorBoard is off: ") and not tracker.active


def test_the_configuration_chooses_the_trackers(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    plain = build_trackers(LoggingConfig(), tmp_path, resumed_iteration=0, settings={})
    both = build_trackers(
        LoggingConfig(tensorboard_dir=str(tmp_path / "tb"), wandb_project="p"),
        tmp_path,
        resumed_iteration=0,
        settings={},
    )
    for tracker in plain + both:
        tracker.observe(metrics(1))
        tracker.close()
    assert (len(plain), len(both), len(fake.opened)) == (1, 2, 1)
    assert list((tmp_path / "tensorboard").iterdir()) and list((tmp_path / "tb").iterdir())
