"""Damaged FP8 scale state, one fault each: the converter stops, the inspector says damaged."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from megafp8.checkpoint.inspect import inspect_checkpoint
from megafp8.checkpoint.inspect_text import inspection_text
from megafp8.checkpoint.offline import write_streaming
from megafp8.checkpoint.rank_scales import LOCAL_PREFIX, SHARED_PREFIX
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.record import TensorEntry
from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint
from megafp8.errors import CheckpointError
from tests.checkpoint.made import make_source
from tests.convert.converted import run_convert

MODULE = "decoder.layers.1.mlp.linear_fc2"
SHARED, LOCAL = f"fp8.{MODULE}.input", f"fp8_local.{MODULE}.grad_output"
Values = dict[str, Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("whole"), tied=False)


def changed(source: Path, root: Path, change: Callable[[Values], None]) -> Path:
    """A copy in one file, its scale state changed."""
    reader = TensorReader.open(source)
    values = {n: reader.read(n) for n in reader.names if n.startswith(("fp8.", "fp8_local."))}
    others = {n: e for n, e in reader.record.tensors.items() if n not in values}
    change(values)
    entries = others | {
        name: TensorEntry(tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in values.items()
    }
    record = dataclasses.replace(reader.record, tensors=entries)
    read = lambda name: values[name] if name in values else reader.read(name)  # noqa: E731
    return write_streaming(root, record, [dict.fromkeys(entries)], read)[0]


def without(*parts: str) -> Callable[[Values], None]:
    def change(values: Values) -> None:
        for name in [n for n in values if any(part in n for part in parts)]:
            del values[name]

    return change


def put(name: str, value: Callable[[Values], Tensor]) -> Callable[[Values], None]:
    return lambda values: values.update({name: value(values)})


RECORD, SHARD = "megafp8.json", "__0_0.distcp"
CASES: dict[str, tuple[Callable[[Values], None], str, str]] = {
    "no scale": (without(f"{SHARED}.scale"), RECORD, f"lists no {SHARED}.scale beside its amax"),
    "no window": (
        without(f"{LOCAL}.amax_history"),
        RECORD,
        f"lists no {LOCAL}.amax_history beside its scale",
    ),
    "no role": (without(f"fp8.{MODULE}.weight."), RECORD, f"lists no fp8.{MODULE}.weight.scale"),
    "no module": (without(MODULE), RECORD, f"lists no fp8.{MODULE}.*, an FP8 module by its plan"),
    "nothing": (without("fp8"), RECORD, "lists no FP8 scale state, and its run has 16 FP8 modules"),
    "shape of a scale": (
        put(f"{SHARED}.scale", lambda v: torch.ones(2)),
        RECORD,
        f"lists {SHARED}.scale as float32[2], expected []",
    ),
    "shape of a window": (
        put(f"{SHARED}.amax_history", lambda v: torch.ones(2, 8)),
        RECORD,
        f"lists {SHARED}.amax_history as float32[2, 8], expected [H]",
    ),
    "no entries": (
        put(f"{SHARED}.amax_history", lambda v: torch.ones(0)),
        RECORD,
        f"lists {SHARED}.amax_history as float32[0], expected [H]",
    ),
    "shape of ranks": (
        put(f"{LOCAL}.scale", lambda v: torch.ones(2)),
        RECORD,
        f"lists {LOCAL}.scale as float32[2], expected [dp, tp]",
    ),
    "other ranks": (
        put(f"{LOCAL}.scale", lambda v: torch.ones(2, 2)),
        RECORD,
        f"lists {LOCAL}.amax_history as float32[1, 2, 8], expected [2, 2] in front",
    ),
    "type": (
        put(f"{SHARED}.scale", lambda v: torch.ones((), dtype=torch.float64)),
        RECORD,
        f"lists {SHARED}.scale as float64[], expected float32",
    ),
    "unknown module": (
        put("fp8.decoder.layers.9.mlp.linear_fc1.input.scale", lambda v: torch.ones(())),
        RECORD,
        "fp8.decoder.layers.9.mlp.linear_fc1.input.scale",
    ),
    "unknown role": (
        put(f"fp8.{MODULE}.qkv.scale", lambda v: torch.ones(())),
        RECORD,
        f"lists fp8.{MODULE}.qkv.scale, of which this model has no FP8 tensor",
    ),
    "no state": (
        put(f"{SHARED}.momentum", lambda v: torch.ones(())),
        RECORD,
        f"lists {SHARED}.momentum, which is no scale and no amax history",
    ),
    "stale": (
        put(f"{SHARED}.scale", lambda v: v[f"{SHARED}.scale"] * 128),
        SHARD,
        f"holds {SHARED}.scale ",
    ),
    "stale on one rank": (
        put(f"{LOCAL}.scale", lambda v: v[f"{LOCAL}.scale"] * torch.tensor([1.0, 1.01])),
        SHARD,
        f"holds {LOCAL}.scale ",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_damaged_scale_state_is_told(source: Path, tmp_path: Path, name: str) -> None:
    change, file, words = CASES[name]
    bad = changed(source, tmp_path / "bad", change)
    found = inspect_checkpoint(bad)
    told = [p for p in found.problems if p.startswith(f"{bad / file} ") and words in p]
    assert len(told) == 1, found.problems
    screen = Console(width=140, record=True, markup=False, file=io.StringIO())
    screen.print(inspection_text(found))
    assert "DAMAGED" in screen.export_text()
    with pytest.raises(CheckpointError) as caught:
        run_convert("megafp8", "megafp8", bad, tmp_path / "out")
    assert told[0] in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_what_is_missing_is_named_as_the_run_names_it(source: Path, tmp_path: Path) -> None:
    """A run of --no-fp8-reduce-amax has all its state for each rank."""
    gone = "decoder.layers.2.mlp.linear_fc2"

    def change(values: Values) -> None:
        without(f"{SHARED}.", gone)(values)
        for name in [name for name in values if name.startswith(SHARED_PREFIX)]:
            value = values.pop(name)
            values[LOCAL_PREFIX + name.removeprefix(SHARED_PREFIX)] = value.expand(
                1, 2, *value.shape
            ).contiguous()

    path = changed(source, tmp_path, change)
    stem = f"{LOCAL_PREFIX}{MODULE}.input"
    assert inspect_checkpoint(path).problems == [
        f"{path / RECORD} lists no {LOCAL_PREFIX}{gone}.*, an FP8 module by its plan",
        f"{path / RECORD} lists no {stem}.scale, nor its amax_history",
    ]


def test_all_faults_are_told_at_once(source: Path, tmp_path: Path) -> None:
    def change(values: Values) -> None:
        for case in ("no scale", "no window", "unknown role"):
            CASES[case][0](values)

    problems = inspect_checkpoint(changed(source, tmp_path, change)).problems
    for case in ("no scale", "no window", "unknown role"):
        assert any(CASES[case][2] in problem for problem in problems)


def test_what_a_window_does_not_tell_is_no_fault(source: Path, tmp_path: Path) -> None:
    """Before the first step, and while an inf freezes a scale."""

    def change(values: Values) -> None:
        values[f"{SHARED}.amax_history"] = torch.zeros(8)
        values[f"fp8.{MODULE}.weight.amax_history"] = torch.tensor([1.0] * 7 + [torch.inf])
        values[f"fp8.{MODULE}.weight.scale"] = torch.tensor(17.0)

    path = changed(source, tmp_path / "early", change)
    found = inspect_checkpoint(path)
    assert found.problems == found.flaws == []
    run_convert("megafp8", "megafp8", path, tmp_path / "out")


@pytest.mark.parametrize("target", [TargetLayout(1, 2), TargetLayout(2, 1, fsdp_size=2)], ids=str)
def test_another_layout_leaves_it_whole(source: Path, tmp_path: Path, target: TargetLayout) -> None:
    moved = reshard_checkpoint(source, tmp_path / "moved", target)
    found = inspect_checkpoint(moved.path)
    assert found.problems == found.flaws == [] and len(found.scales) == 16 * 3
    names = {name for name in found.record.tensors if name.startswith(SHARED_PREFIX)}
    assert len(names) == 16 * 2 * 2
    assert sum(name.startswith(LOCAL_PREFIX) for name in found.record.tensors) == 16 * 2
