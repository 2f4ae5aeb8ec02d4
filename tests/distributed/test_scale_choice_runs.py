"""Scales of a run's first step at any layout: those of one process."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint
from tests.support.layouts import BOUNDS, PARITY, SP, degrees, start_training
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL

BASE = (*PARITY, *SMALL)
OWN = "--no-fp8-reduce-amax"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp2 + sp": (2, degrees(2, 1, SP)),
    "fsdp2, fp8 gathers": (2, degrees(1, 1, "--fp8-param-gather")),
    "pp2": (2, degrees(1, 2)),
    "tp2 x fsdp2": (4, degrees(2, 1, SP)),
}


@dataclass
class Start:
    """A rank before its first step (scale state by name) and what that step came to."""

    tensors: dict[str, Tensor]
    loss: float
    norm: float
    saved: str


def start(
    flags: tuple[str, ...], load: str | None = None, iterations: int = 1, save: str | None = None
) -> Start:
    training = start_training(flags, load)
    registry = training.model.registry
    assert registry is not None
    before = registry.tensors()
    curve = training.iterate(iterations)
    saved = training.save(save) if save is not None else ""
    return Start(before, curve.losses[-1], curve.grad_norms[-1], saved)


def joined(ranks: list[Start]) -> dict[str, Tensor]:
    """The scale state of all ranks; those that share an entry have the same."""
    merged: dict[str, Tensor] = {}
    for rank in ranks:
        for name, value in rank.tensors.items():
            assert torch.equal(merged.setdefault(name, value), value), name
    return merged


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert not different, different


@pytest.fixture(scope="module")
def alone(ranks: Ranks) -> Start:
    (found,) = ranks.run(start, world_size=1, flags=(*BASE, *degrees()))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_first_scales_of_weights_are_those_of_whole_masters(
    ranks: Ranks, alone: Start, name: str
) -> None:
    size, layout = LAYOUTS[name]
    found = ranks.run(start, world_size=size, flags=(*BASE, *layout))
    wanted = alone.tensors
    assert_same(joined(found), wanted)
    scales = {k: float(v) for k, v in wanted.items() if k.endswith(".scale")}
    assert all((value != 1.0) == (".weight." in key) for key, value in scales.items())
    assert abs(found[0].loss / alone.loss - 1) <= BOUNDS["fp8"][0]
    assert abs(found[0].norm / alone.norm - 1) <= BOUNDS["fp8"][1]


def test_ranks_with_scales_of_their_own_start_with_those_of_their_parts(
    ranks: Ranks, alone: Start
) -> None:
    """Tensor-parallel ranks hold other parts of a weight, data-parallel ones shards of one."""
    split = ranks.run(start, world_size=2, flags=(*BASE, *degrees(2), OWN))
    shared = ranks.run(start, world_size=2, flags=(*BASE, *degrees(), OWN))
    assert_same(joined(shared), alone.tensors)
    differ = 0
    for name, value in alone.tensors.items():
        parts = [rank.tensors[name] for rank in split]
        assert torch.equal(torch.stack(parts).amin(0), value), name
        differ += not torch.equal(*parts)
    assert differ


def test_another_format_at_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Windows of two ranks in hybrid; scales of one in E4M3, gradients' 128 times smaller."""
    flags = (*BASE, *degrees(2, 1, SP))
    hybrid = ranks.run(start, world_size=2, flags=flags, iterations=3, save=str(tmp_path / "a"))
    flags = (*BASE, *degrees(), "--fp8-format", "e4m3")
    (found,) = ranks.run(start, world_size=1, flags=flags, load=hybrid[0].saved)
    stored = TensorReader.open(Path(hybrid[0].saved))
    for name, value in found.tensors.items():
        moved = name.endswith("grad_output.scale")
        assert torch.equal(value, stored.read(name) / (128 if moved else 1)), name


def test_scales_of_ranks_merge_with_their_windows(ranks: Ranks, tmp_path: Path) -> None:
    """By a quantile no rank's scale is that of the merged window: tool and run choose it anew."""
    rule = ("--fp8-amax-compute-algo", "quantile:0.5", "--fp8-amax-history-len", "4", OWN)
    flags = (*BASE, *degrees(2), *rule)
    saved = ranks.run(start, world_size=2, flags=flags, iterations=3, save=str(tmp_path / "a"))
    one = (*BASE, *degrees(), *rule)
    (live,) = ranks.run(start, world_size=1, flags=one, load=saved[0].saved)
    report = reshard_checkpoint(Path(saved[0].saved), tmp_path / "b", TargetLayout())
    (offline,) = ranks.run(start, world_size=1, flags=one, load=str(report.path))
    assert_same(offline.tensors, live.tensors)
    before, after = TensorReader.open(Path(saved[0].saved)), TensorReader.open(report.path)
    smaller = 0
    for name, value in live.tensors.items():
        local = name.replace("fp8.", "fp8_local.", 1)
        assert torch.equal(after.read(local)[0, 0], value), name
        if name.endswith(".scale"):
            window = live.tensors[name.replace("scale", "amax_history")]
            largest = 57344.0 if "grad_output" in name else 448.0
            median = window[window > 0].median()  # of three entries
            assert torch.equal(value, torch.tensor(largest) / median), name
            smaller += bool(value < before.read(local).min())
    assert smaller
