"""One checkpoint at every other layout: loading it there and the tool give the same bits."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megafp8.checkpoint import read_record
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint
from tests.support.layouts import (
    BOUNDS,
    PARITY,
    SP,
    Curve,
    degrees,
    deviations,
    merge_stages,
    start_training,
)
from tests.support.limits import slow
from tests.support.ranks import Ranks

BASE = (*PARITY, "--num-layers", "4", "--global-batch-size", "8", "--fp8-amax-history-len", "8")
VPP = ("--num-layers-per-virtual-pipeline-stage", "1")
HOME = degrees(2, 2, SP)
TARGETS: dict[str, tuple[int, tuple[str, ...], TargetLayout]] = {
    "1": (1, degrees(), TargetLayout()),
    "tp4": (4, degrees(4), TargetLayout(tensor_model_parallel_size=4)),
    "pp4": (4, degrees(1, 4), TargetLayout(pipeline_model_parallel_size=4)),
    "fsdp4": (4, degrees(), TargetLayout(fsdp_size=4)),
    "tp2 fsdp2": (4, degrees(2, 1, SP), TargetLayout(2, 1, 2)),
    "hsdp": (4, degrees(1, 1, "--fsdp-size", "2"), TargetLayout(1, 1, 2, 2)),
    "pp2 vpp2": (2, degrees(1, 2, *VPP), TargetLayout(1, 2, 1, 1, 1)),
}


@dataclass
class Leg:
    """What a rank held after loading and saving again, and the iterations after that."""

    held: dict[str, str]
    saved: str
    curve: Curve


def leg(flags: tuple[str, ...], load: str | None, save: str, iterations: int) -> Leg:
    """Load or train two iterations, save, go on; a function for ranks."""
    training = start_training(flags, load)
    if load is None:
        training.iterate(2)
    held = {
        name: value for name, value in training.digests().items() if not name.startswith("live.")
    }
    return Leg(held, training.save(save), training.iterate(iterations))


@pytest.fixture(scope="module")
def home(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Leg]:
    root = str(tmp_path_factory.mktemp("home"))
    return ranks.run(leg, world_size=4, flags=(*BASE, *HOME), load=None, save=root, iterations=2)


def parts(directory: str | Path) -> dict[str, set[str]]:
    """The parts that a checkpoint stores of each tensor."""
    metadata = TensorReader(Path(directory), read_record(Path(directory))).metadata
    return {
        name: {repr(chunk) for chunk in tensor.chunks}  # type: ignore[union-attr]
        for name, tensor in metadata.state_dict_metadata.items()
    }


SLOW = ("pp4", "tp2 fsdp2", "hsdp")


@pytest.mark.parametrize("name", [slow(n) if n in SLOW else n for n in TARGETS])
def test_online_and_offline_agree(ranks: Ranks, tmp_path: Path, home: list[Leg], name: str) -> None:
    size, layout, target = TARGETS[name]
    report = reshard_checkpoint(Path(home[0].saved), tmp_path / "offline", target)
    legs = ranks.run(
        leg,
        world_size=size,
        flags=(*BASE, *layout),
        load=str(report.path),
        save=str(tmp_path / "online"),
        iterations=2,
    )
    # Weights, moments, scales, scale_inv and histories, bit for bit.
    assert merge_stages([rank.held for rank in legs]) == merge_stages([rank.held for rank in home])
    # And the ranks themselves save what the tool wrote for them, part by part.
    assert parts(legs[0].saved) == parts(report.path)
    online, offline = read_record(Path(legs[0].saved)), read_record(report.path)
    assert online.files.keys() == offline.files.keys()
    assert online.layout == offline.layout
    loss, norm = deviations(legs[0].curve, home[0].curve)
    assert loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1], (loss, norm)
    back = reshard_checkpoint(Path(legs[0].saved), tmp_path / "back", TargetLayout(2, 2))
    crcs = {row.name: row.crc_after for row in back.tensors}
    assert crcs == {row.name: row.crc_before for row in report.tensors}
