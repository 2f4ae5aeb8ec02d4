"""A part of the state that saving and loading have never heard of is saved, resumed and missed."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.checkpoint import read_record
from megafp8.checkpoint.whole_model import load_model
from megafp8.train.parts import NamedPart
from megafp8.train.state import TrainState, load_run
from tests.model.small import (
    FP8,
    VOCAB,
    Run,
    one_rank,  # noqa: F401
    small_config,
    start_run,
    world,
)
from tests.support.states import load_state, save_state

pytestmark = pytest.mark.usefixtures("one_rank")
MEAN = "state.monitor.mean"


class Monitor:
    """Counts, and keeps a mean."""

    def __init__(self) -> None:
        self.seen, self.mean = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]
        self.mean.copy_(state["mean"])


def monitored(**changes: Any) -> tuple[Run, Monitor]:
    run, monitor = start_run(small_config(**{**FP8, **changes})), Monitor()
    run.step.register(NamedPart("monitor", monitor, "it counts from 0"))
    return run, monitor


def saved(root: Path) -> Path:
    run, monitor = monitored()
    monitor.seen = 5
    monitor.mean.fill_(0.5)
    return save_state(root, TrainState(1, 8), run.step, VOCAB)


def test_a_new_part_is_saved_and_resumed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    record = read_record(path)
    assert record.state["monitor"] == {"seen": 5} and MEAN in record.tensors
    run, monitor = monitored()
    assert load_state(path, run.step) == TrainState(1, 8)
    assert monitor.seen == 5 and monitor.mean.tolist() == [0.5] * 3


def test_weights_alone_are_taken_without_it(tmp_path: Path) -> None:
    path = saved(tmp_path)
    run, monitor = monitored(finetune=True, load=str(path))
    assert load_state(path, run.step) == TrainState()
    assert monitor.seen == 0 and not monitor.mean.any()
    load_model(path, world())


def test_a_run_that_does_not_know_it_leaves_it(tmp_path: Path) -> None:
    path, run = saved(tmp_path), start_run(small_config(**FP8))
    assert load_run(path, TrainState(), run.step).tensors["dropped"] == 1


class Counter(Monitor):
    """The monitor of an earlier version: without a mean."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 5}


@pytest.mark.parametrize("before", [[], [NamedPart("monitor", Counter())]], ids=["none", "half"])
def test_what_a_missing_part_means_is_said(
    tmp_path: Path, before: list[NamedPart], caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(small_config(**FP8))
    for part in before:
        run.step.register(part)
    path = save_state(tmp_path, TrainState(1, 8), run.step, VOCAB)
    run, monitor = monitored()
    with caplog.at_level(logging.WARNING, "megafp8"):
        certificate = load_run(path, TrainState(), run.step)
    assert f"{path} holds no monitor: it counts from 0" in caplog.messages
    assert certificate.tensors["defaulted"] == 1
    assert monitor.seen == 0 and not monitor.mean.any()


def test_a_name_is_given_once() -> None:
    run, _ = monitored()
    with pytest.raises(AssertionError, match="monitor"):
        run.step.register(NamedPart("monitor", Monitor()))
