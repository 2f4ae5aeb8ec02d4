"""State that a checkpoint holds whole and that no run should go on from."""

import dataclasses
import logging
import math
from pathlib import Path

import pytest
from torch import Tensor

from megafp8.checkpoint.find import read_record
from megafp8.checkpoint.offline import write_streaming
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.scale_state import scale_targets
from megafp8.errors import CheckpointError
from megafp8.train.state import TrainState
from tests.model.small import (
    FP8,
    VOCAB,
    one_rank,  # noqa: F401
    small_config,
    start_run,
)
from tests.support.states import load_state, save_state

pytestmark = pytest.mark.usefixtures("one_rank")
WEIGHT = "decoder.layers.1.mlp.linear_fc1.weight"
MOMENT = f"optimizer.{WEIGHT}.exp_avg"
NOT_FINITE = "holds 1 values that are not finite"


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        (WEIGHT, math.nan, NOT_FINITE),
        (WEIGHT, -math.inf, NOT_FINITE),
        (MOMENT, math.nan, NOT_FINITE),
        (MOMENT, math.inf, NOT_FINITE),
        (f"{MOMENT}_sq", -1e-30, "holds 1 negative values, down to -1e-30"),
        (f"{MOMENT}_sq", math.nan, NOT_FINITE),
        (f"optimizer.{WEIGHT}.step", math.inf, NOT_FINITE),
        (f"optimizer.{WEIGHT}.step", -1.0, "holds 1 negative values, down to -1"),
        (f"optimizer.{WEIGHT}.step", 2.5, "holds 2.5 steps, expected a whole number"),
    ],
)
def test_values_that_no_run_has_are_named(
    tmp_path: Path, name: str, bad: float, message: str
) -> None:
    config = small_config(**FP8)
    run = start_run(config)
    run.train(range(1))
    good = save_state(tmp_path, TrainState(1, 8), run.step, VOCAB)
    path = rewritten(good, tmp_path, name, bad)
    with pytest.raises(CheckpointError) as raised:
        load_state(path, run.step)
    text = str(raised.value)
    assert text.startswith(f"{path} holds values that no run has, in 1 tensor: {name} ({message})")
    assert text.endswith(f"; use --load {good} instead")
    load_state(good, run.step)


def rewritten(good: Path, root: Path, name: str, bad: float) -> Path:
    """A checkpoint whose checksums are right and one of whose tensors ends with another value."""
    reader = TensorReader.open(good)

    def read(wanted: str) -> Tensor:
        tensor = reader.read(wanted)
        if wanted == name:
            tensor.view(-1)[-1:] = bad
        return tensor

    record = dataclasses.replace(reader.record, iteration=2)
    names = [dict.fromkeys(record.tensors)]
    return write_streaming(root, record, names, read)[0]


def test_a_window_with_a_negative_amax_is_named(tmp_path: Path) -> None:
    config = small_config(**FP8)
    run = start_run(config)
    run.train(range(1))
    good = save_state(tmp_path, TrainState(1, 8), run.step, VOCAB)
    name = next(n for n in read_record(good).tensors if n.endswith(".amax_history"))
    path = rewritten(good, tmp_path, name, -2.0)
    with pytest.raises(CheckpointError, match=f"{name} holds -2"):
        load_state(path, run.step)


@pytest.mark.parametrize("shape", [(), (0,), (2, 2), (10**13,)])
def test_a_window_of_an_impossible_shape_is_not_allocated(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    config = small_config(**FP8)
    run = start_run(config)
    run.train(range(1))
    path = save_state(tmp_path, TrainState(1, 8), run.step, VOCAB)
    record = read_record(path)
    name = next(name for name in record.tensors if name.endswith(".amax_history"))
    entry = dataclasses.replace(record.tensors[name], shape=shape)
    record = dataclasses.replace(record, tensors={**record.tensors, name: entry})
    with pytest.raises(
        CheckpointError,
        match=r"iter_0000001/megafp8.json is damaged: .* has shape .*, expected \[H\]",
    ):
        scale_targets(run.model.registry, record, path, run.mesh, reduced=True)


def test_a_folder_of_another_iteration_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(**FP8)
    run = start_run(config)
    path = save_state(tmp_path, TrainState(1, 8), run.step, VOCAB)
    renamed = path.rename(tmp_path / "iter_0000999")
    with caplog.at_level(logging.WARNING, "megafp8"):
        state = load_state(renamed, run.step)
    assert state.iteration == 1 and "is of iteration 1 by its record" in caplog.text
