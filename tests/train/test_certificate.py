"""The certificate of a resumed run counts each tensor once, and says what was done to scales."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint.find import read_record
from megafp8.checkpoint.offline import write_streaming
from megafp8.checkpoint.reader import TensorReader
from megafp8.errors import CheckpointError
from megafp8.train.state import Certificate, TrainState, load_run
from tests.model.small import (
    FP8,
    VOCAB,
    one_rank,  # noqa: F401
    small_config,
    start_run,
)
from tests.support.states import save_state

pytestmark = pytest.mark.usefixtures("one_rank")
OWN = {**FP8, "fp8_reduce_amax": False}
BF16 = {"bf16": True}


def saved(tmp_path: Path, settings: dict[str, Any]) -> Path:
    config = small_config(**settings)
    run = start_run(config)
    run.train(range(1))
    return save_state(tmp_path / "a", TrainState(1, 8), run.step, VOCAB, "ab")


def certificate(path: Path, settings: dict[str, Any]) -> Certificate:
    config = small_config(**settings)
    run = start_run(config)
    return load_run(path, TrainState(), run.step)


def counts(path: Path) -> tuple[int, int]:
    """Tensors of a checkpoint: of weights and optimizer, of scale state."""
    names = read_record(path).tensors
    scales = sum(name.startswith(("fp8.", "fp8_local.")) for name in names)
    return len(names) - scales, scales


@pytest.mark.parametrize("settings", [FP8, OWN, BF16], ids=["fp8", "own scales", "bf16"])
def test_the_same_run_gets_everything(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = saved(tmp_path, settings)
    others, scales = counts(path)
    assert (scales > 0) is (settings is not BF16)
    found = certificate(path, settings)
    assert found.tensors == {
        "loaded": others + scales,
        "remapped": 0,
        "defaulted": 0,
        "dropped": 0,
    }
    assert (found.path, found.manifest_sha256) == (path, "ab")
    assert (found.scale_state_sha256 is None) is (settings is BF16)
    rules = {True: None, False: "each rank keeps its own"}
    assert found.scale_state_rule == rules[settings is not OWN]


def test_fp8_that_is_newly_switched_on_or_off(tmp_path: Path) -> None:
    fp8, bf16 = saved(tmp_path / "fp8", FP8), saved(tmp_path / "bf16", BF16)
    others, scales = counts(fp8)
    assert counts(bf16) == (others, 0)
    on, off = certificate(bf16, FP8), certificate(fp8, BF16)
    assert on.tensors == {"loaded": others, "remapped": 0, "defaulted": scales, "dropped": 0}
    assert off.tensors == {"loaded": others, "remapped": 0, "defaulted": 0, "dropped": scales}
    assert on.scale_state_sha256 is not None and off.scale_state_sha256 is None
    assert on.scale_state_rule is None
    assert certificate(bf16, OWN).scale_state_rule is None


def test_scales_of_ranks_and_shared_ones_change_into_each_other(tmp_path: Path) -> None:
    shared, own = saved(tmp_path / "shared", FP8), saved(tmp_path / "own", OWN)
    apart, together = certificate(shared, OWN), certificate(own, FP8)
    assert apart.scale_state_rule == "one scale for all ranks, copied to each"
    assert together.scale_state_rule == "those of the only rank"
    for found in (apart, together):
        assert found.tensors["defaulted"] == found.tensors["dropped"] == 0
    assert apart.scale_state_sha256 == together.scale_state_sha256


@pytest.mark.parametrize("tail", ["scale", "amax_history"])
def test_half_a_scale_state_counts_as_none(tmp_path: Path, tail: str) -> None:
    """A scale without its window starts anew, as does a window without its scale."""
    path = saved(tmp_path, FP8)
    others, scales = counts(path)
    reader = TensorReader.open(path)
    name = next(n for n in reader.record.tensors if n.startswith("fp8.") and n.endswith(tail))
    kept = {n: entry for n, entry in reader.record.tensors.items() if n != name}

    record = dataclasses.replace(reader.record, tensors=kept)
    half, _ = write_streaming(tmp_path / "b", record, [dict.fromkeys(kept)], reader.read)
    found = certificate(half, FP8)
    assert found.tensors == {
        "loaded": others + scales - 2,
        "remapped": 0,
        "defaulted": 2,
        "dropped": 0,
    }


def test_a_checkpoint_without_optimizer_state_says_what_to_give(tmp_path: Path) -> None:
    path = saved(tmp_path, {**FP8, "no_save_optim": True})
    with pytest.raises(CheckpointError, match="holds no optimizer state .* give --finetune") as one:
        certificate(path, FP8)
    assert "--no-load-optim to go on at iteration 1" in str(one.value)
    names = read_record(path).tensors
    for flag in ("finetune", "no_load_optim"):
        found = certificate(path, {**FP8, "load": str(path), flag: True})
        assert found.tensors["loaded"] == len(names) and found.tensors["defaulted"] == 0
