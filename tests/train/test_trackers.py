"""TensorBoard and W&B: what they are given, and that no failure of theirs reaches the training."""

import logging
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megafp8.config.records import LoggingConfig
from megafp8.train.metrics import IterationMetrics
from megafp8.train.trackers import build_trackers, tensorboard_tracker, wandb_tracker


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
