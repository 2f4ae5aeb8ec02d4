"""Looking at a checkpoint: what it holds, whether it is whole, and how it differs from another."""

import dataclasses
import io
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from megafp8.checkpoint import read_record
from megafp8.checkpoint.inspect import compare_checkpoints, inspect_checkpoint
from megafp8.checkpoint.inspect_text import changes_text, inspection_text, sparkline
from megafp8.checkpoint.offline import write_streaming
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.record import TensorEntry
from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint
from megafp8.checkpoint.tensors import bytes_of
from megafp8.checkpoint.values import flaw
from megafp8.errors import CheckpointError
from tests.checkpoint.made import copy_of, flip_a_bit, make_source, value
from tests.convert.converted import run_convert

TOOL = Path(__file__).resolve().parents[2] / "tools" / "inspect_checkpoint.py"
WEIGHT = "decoder.layers.2.mlp.linear_fc1.weight"
SCALE = "fp8.decoder.layers.1.mlp.linear_fc2.input.scale"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("inspected"), tied=False)


def show(*parts: object) -> str:
    screen = Console(width=140, record=True, markup=False, file=io.StringIO())
    screen.print(*parts)
    return screen.export_text()


def test_a_good_checkpoint(source: Path) -> None:
    found = inspect_checkpoint(source.parent)
    assert found.problems == []
    record = read_record(source)
    assert sum(share.tensors for share in found.shares) == len(record.tensors)
    assert sum(share.size for share in found.shares) == sum(map(bytes_of, record.tensors.values()))
    assert {(s.kind, s.dtype) for s in found.shares} == {
        ("weights", "float32"),
        ("optimizer", "float32"),
        ("optimizer", "bfloat16"),
        ("FP8 scale state", "float32"),
        ("other", "uint8"),
        ("other", "bfloat16"),
    }
    shared = next(
        r for r in found.scales if (r.module, r.role) == (SCALE.split(".", 1)[1][:-12], "input")
    )
    window = value(SCALE.replace("scale", "amax_history"), TensorEntry((8,), "float32"))
    assert shared.scale.item() == value(SCALE, TensorEntry((), "float32")).item()
    assert (shared.newest, shared.largest, shared.filled) == (
        window[-1].item(),
        window.max().item(),
        8,
    )
    assert {tuple(row.scale.shape) for row in found.scales} == {(1, 1), (1, 2)}
    text = show(inspection_text(found))
    assert "4 ranks: tp 2 x pp 2 x vp 1 x fsdp 1 x replicate 1" in text
    assert f"good: {len(record.files)} files" in text
    assert "log2(scale) by layer" in text and "mlp.linear_fc2" in text
    assert show(inspection_text(found, ascii_only=True)).isascii()


def test_bars() -> None:
    assert sparkline([0.0, 1.0, 7.0, 8.0], ascii_only=True) == "_.##"
    assert sparkline([3.0, 3.0], ascii_only=True) == "__"


def test_damage_is_named_and_ends_with_2(source: Path, tmp_path: Path) -> None:
    damaged = copy_of(source, tmp_path)
    flip_a_bit(damaged / "__1_0.distcp")
    (damaged / "__2_0.distcp").unlink()
    found = inspect_checkpoint(damaged)
    assert len(found.problems) == 2 and found.scales == []
    done = subprocess.run(
        [sys.executable, str(TOOL), str(damaged)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done
    (line,) = done.stderr.strip().splitlines()
    assert "__1_0.distcp is damaged: crc32" in line and "__2_0.distcp is missing" in line
    assert "DAMAGED" in done.stdout and "4 ranks" in done.stdout
    (damaged / "megafp8.json").unlink()
    with pytest.raises(CheckpointError, match="partial"):
        inspect_checkpoint(damaged)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        inspect_checkpoint(tmp_path / "nowhere")


def test_both_are_found_before_one_is_read(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for other, wrong in ((tmp_path / "nowhere", "no such folder"), (tmp_path, "no checkpoint")):
        monkeypatch.setattr(sys, "argv", [TOOL.name, str(source), "--diff", str(other)])
        with pytest.raises(SystemExit, match="^2$"):
            runpy.run_path(str(TOOL), run_name="__main__")
        shown = capsys.readouterr()
        assert shown.out == "" and len(shown.err.splitlines()) == 1 and wrong in shown.err


def test_differences(source: Path, tmp_path: Path) -> None:
    reader = TensorReader.open(source)
    entries = dict(reader.record.tensors)
    del entries["rng.cpu"]
    entries["new"] = TensorEntry((2,), "float32")
    entries["empty"] = TensorEntry((0, 4), "bfloat16")

    def read(name: str) -> Tensor:
        if name == "new":
            return torch.ones(2)
        if name == "empty":
            return torch.empty((0, 4), dtype=torch.bfloat16)
        tensor = reader.read(name)
        if name == WEIGHT:
            tensor[0, 5, 3] += 0.25
            tensor[1, 2, 1] -= 0.5
        return tensor * 4 if name == SCALE else tensor

    record = dataclasses.replace(reader.record, tensors=entries)
    other, _ = write_streaming(tmp_path, record, [dict.fromkeys(entries)], read)
    changes = {change.name: change for change in compare_checkpoints(source, other)}
    assert {name: change.change for name, change in changes.items()} == {
        "new": "added",
        "rng.cpu": "removed",
        "empty": "reshaped",
        WEIGHT: "changed",
        SCALE: "changed",
    }
    assert (changes[WEIGHT].elements, changes[WEIGHT].largest) == (2, pytest.approx(0.5, rel=1e-6))
    assert changes[SCALE].drift == pytest.approx(2.0) and changes[WEIGHT].drift is None
    text = show(
        changes_text(changes.values(), inspect_checkpoint(source), inspect_checkpoint(other))
    )
    assert "bfloat16[0, 3] -> bfloat16[0, 4]" in text and "1 scales moved, by up to 2.000" in text
    assert list(compare_checkpoints(source, source)) == []


def test_nan_is_a_difference_that_shows(source: Path, tmp_path: Path) -> None:
    reader = TensorReader.open(source)

    def read(name: str) -> Tensor:
        tensor = reader.read(name)
        if name == WEIGHT:
            tensor[0, 0, 0] = math.nan
        return tensor

    entries = reader.record.tensors
    other, _ = write_streaming(tmp_path, reader.record, [dict.fromkeys(entries)], read)
    (change,) = compare_checkpoints(source, other)
    assert change.name == WEIGHT and math.isnan(change.largest)


@pytest.mark.parametrize("wrong", [0.0, math.nan])
def test_what_is_no_scale_is_shown_as_that(source: Path, tmp_path: Path, wrong: float) -> None:
    reader = TensorReader.open(source)

    def read(name: str) -> Tensor:
        return torch.tensor(wrong) if name == SCALE else reader.read(name)

    entries = reader.record.tensors
    other, _ = write_streaming(tmp_path, reader.record, [dict.fromkeys(entries)], read)
    text = show(inspection_text(inspect_checkpoint(other)))
    assert f"{wrong:.6g}" in text and "nan" in text and "?" in text
    changes = list(compare_checkpoints(source, other))
    assert [change.name for change in changes] == [SCALE] and math.isnan(changes[0].drift or 0.0)
    assert "1 changed" in show(
        changes_text(changes, inspect_checkpoint(source), inspect_checkpoint(other))
    )


FLAWS = {
    (f"optimizer.{WEIGHT}.exp_avg_sq", -1.0): "1 negative values, down to -1",
    (f"optimizer.{WEIGHT}.exp_avg_sq", math.nan): "1 values that are not finite",
    (f"optimizer.{WEIGHT}.exp_avg", math.inf): "1 values that are not finite",
    (f"optimizer.{WEIGHT}.step", -3.0): "1 negative values, down to -3",
    (f"optimizer.{WEIGHT}.step", 2.5): "2.5 steps, expected a whole number",
    (WEIGHT, -math.inf): "1 values that are not finite",
    (SCALE, 0.0): "a scale of 0, expected positive ones",
    (SCALE.replace("scale", "amax_history"), -2.0): "1 negative values, down to -2",
}


@pytest.mark.parametrize(("name", "wrong"), FLAWS)
def test_values_that_are_wrong_in_any_run(source: Path, name: str, wrong: float) -> None:
    tensor = TensorReader.open(source).read(name).clone()
    assert flaw(name, tensor) is None
    tensor.view(-1)[-1] = wrong
    assert flaw(name, tensor) == f"holds {FLAWS[name, wrong]}"


@pytest.mark.parametrize(("name", "wrong"), [(WEIGHT, -math.inf), (SCALE, 0.0)])
def test_values_that_no_run_can_go_on_from(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    wrong: float,
) -> None:
    words = FLAWS[name, wrong]
    reader = TensorReader.open(source)

    def read(key: str) -> Tensor:
        tensor = reader.read(key).clone()
        if key == name:
            tensor.view(-1)[-1] = wrong
        return tensor

    holdings = [dict.fromkeys(reader.record.tensors)]
    other, _ = write_streaming(tmp_path / "bad", reader.record, holdings, read)
    assert inspect_checkpoint(source).flaws == []
    assert inspect_checkpoint(other).flaws == [f"{name} holds {words}"]
    # The verdict and the exit code say so, after the comparison with a good one.
    monkeypatch.setattr(sys, "argv", ["inspect", str(other), "--diff", str(source)])
    assert runpy.run_path(str(TOOL))["main"]() == 2
    out, err = capsys.readouterr()
    assert "VALUES UNUSABLE" in out and "1 changed" in out
    assert err == f"error: values that no run can go on from: {name} holds {words}\n"
    # Another layout changes nothing of it, and the report says so.
    report = reshard_checkpoint(other, tmp_path / "new", TargetLayout(fsdp_size=2))
    (warning,) = [note for note in report.notes if note.startswith("WARNING")]
    assert f"{name} holds {words}" in warning
    if name == SCALE:
        with pytest.raises(CheckpointError, match="holds a scale of 0, expected positive"):
            run_convert("megafp8", "hf", other, tmp_path / "out", fp8="static")


def test_a_foreign_shard_is_a_problem(source: Path, tmp_path: Path) -> None:
    copy = copy_of(source, tmp_path)
    (copy / "__9_0.distcp").write_bytes(b"x")
    assert inspect_checkpoint(copy).problems == [
        f"{copy / '__9_0.distcp'} is no file of this checkpoint"
    ]
