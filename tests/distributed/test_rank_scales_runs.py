"""`--no-fp8-reduce-amax`: each rank keeps its own scales, trains with them and gets them back."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import read_record
from megafp8.checkpoint.rank_scales import move_ranks
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint
from megafp8.errors import CheckpointError
from megafp8.train.state import load_run
from tests.support.layouts import BOUNDS, PARITY, QUIET, Curve, degrees, deviations, start_training
from tests.support.limits import slow
from tests.support.ranks import RankError, Ranks

OWN = "--no-fp8-reduce-amax"
SIZES = ("--num-layers", "2", "--global-batch-size", "8", "--fp8-amax-history-len", "4")
BASE = (*PARITY, *QUIET, *SIZES)
SP_BF16 = ("--sequence-parallel", "--fp8-tp-comm", "none")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp2": (2, degrees()),
    "tp2": (2, degrees(2)),
    "tp2 + sp": (2, degrees(2, 1, *SP_BF16)),
    "tp2 x dp2": (4, degrees(2)),
    "hsdp 2 x 2": (4, degrees(1, 1, "--fsdp-size", "2")),
    "dp2, fp8 gathers": (2, degrees(1, 1, "--fp8-param-gather", "--fp8-grad-reduce")),
    "pp2 x dp2": (4, degrees(1, 2)),
}


@dataclass
class Leg:
    """Some iterations on one rank.

    Attributes:
        place: (dp rank, tp rank).
        before, after: scale state under its shared names.
        curve: the iterations.
        saved: the checkpoint, if any.
        rule: of the certificate.
    """

    place: tuple[int, int]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    curve: Curve
    saved: str
    rule: str | None


def leg(
    flags: tuple[str, ...], iterations: int, load: str | None = None, save: str | None = None
) -> Leg:
    training = start_training(flags)
    rule, registry = None, training.model.registry
    assert registry is not None
    if load is not None:
        rule = load_run(Path(load), training.state, training.step).scale_state_rule
    before = registry.tensors()
    curve = training.iterate(iterations)
    saved = training.save(save) if save is not None else ""
    place = (training.mesh.dp_rank, training.mesh.tp_rank)
    return Leg(place, before, registry.tensors(), curve, saved, rule)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Curve:
    return ranks.run(leg, world_size=1, flags=(*BASE, *degrees()), iterations=6)[0].curve


@pytest.mark.parametrize("layout", [degrees(), degrees(2)], ids=["dp2", "tp2"])
def test_shared_scales_are_those_of_one_rank(ranks: Ranks, layout: tuple[str, ...]) -> None:
    """The largest amax over ranks is what one rank that sees all tensors records."""
    (alone,) = ranks.run(leg, world_size=1, flags=(*BASE, *degrees()), iterations=1)
    found = ranks.run(leg, world_size=2, flags=(*BASE, *layout), iterations=1)
    assert same(found[0].after, found[1].after)
    windows = [name for name in alone.after if name.endswith(".amax_history")]
    assert len(windows) == 3 * 4 * 2
    for name in windows:
        # Sums in BF16 differ by a few percent; those of two amaxes would by far more.
        assert torch.allclose(found[0].after[name], alone.after[name], rtol=0.2), name


SLOW = ("hsdp 2 x 2", "pp2 x dp2", "dp2", "tp2")


@pytest.mark.parametrize("name", [slow(n) if n in SLOW else n for n in LAYOUTS])
def test_ranks_keep_and_get_back_their_own_scales(
    ranks: Ranks, tmp_path: Path, one_rank: Curve, name: str
) -> None:
    size, layout = LAYOUTS[name]
    flags = (*BASE, *layout, OWN)
    first = ranks.run(leg, world_size=size, flags=flags, iterations=3, save=str(tmp_path))
    straight = ranks.run(leg, world_size=size, flags=flags, iterations=6)
    second = ranks.run(leg, world_size=size, flags=flags, iterations=3, load=first[0].saved)
    for rank in range(size):
        assert same(second[rank].before, first[rank].after)
        assert same(second[rank].after, straight[rank].after)
        assert second[rank].curve.losses == straight[rank].curve.losses[3:]
        assert second[rank].rule == "each rank keeps its own"
    loss, norm = deviations(straight[0].curve, one_rank)
    assert loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1], (loss, norm)
    _check_who_agrees(first)
    entries = read_record(Path(first[0].saved)).tensors
    assert not any(entry.startswith("fp8.") for entry in entries)
    stored = TensorReader.open(Path(first[0].saved))
    for part in first:
        for entry, value in part.after.items():
            whole = stored.read(entry.replace("fp8.", "fp8_local.", 1))
            assert torch.equal(whole[part.place], value), entry


def _check_who_agrees(legs: list[Leg]) -> None:
    """A weight's scale is the same on all dp ranks; what ranks see of their own differs.

    Of weights tensor-parallel ranks see their own, of everything else all ranks do.
    """
    differing = set()
    for one in legs:
        for other in legs:
            if one.place[1] == other.place[1] and one.after.keys() == other.after.keys():
                for name, value in one.after.items():
                    if ".weight." in name:
                        assert torch.equal(value, other.after[name]), name
            differing |= {
                name
                for name, value in one.after.items()
                if name in other.after and not torch.equal(value, other.after[name])
            }
    assert any(".amax_history" in name for name in differing)
    assert any(".scale" in name for name in differing)
    parts = len({one.place[1] for one in legs})
    assert any(".weight.amax_history" in name for name in differing) is (parts > 1)


def test_scales_of_ranks_move_online_as_offline(ranks: Ranks, tmp_path: Path) -> None:
    """tp2 x dp2 -> one rank, dp4, shared scales: maxima and copies, by loading and by the tool."""
    first = ranks.run(
        leg, world_size=4, flags=(*BASE, *degrees(2), OWN), iterations=3, save=str(tmp_path / "a")
    )
    source = TensorReader.open(Path(first[0].saved))
    targets = {
        "1": (1, degrees(), TargetLayout()),
        "tp4": (4, degrees(4), TargetLayout(tensor_model_parallel_size=4)),
        "dp4": (4, degrees(), TargetLayout(fsdp_size=4)),
    }
    for name, (size, layout, target) in targets.items():
        loaded = ranks.run(
            leg, world_size=size, flags=(*BASE, *layout, OWN), iterations=0, load=first[0].saved
        )
        report = reshard_checkpoint(Path(first[0].saved), tmp_path / name, target)
        again = ranks.run(
            leg,
            world_size=size,
            flags=(*BASE, *layout, OWN),
            iterations=0,
            load=str(report.path),
        )
        for rank in range(size):
            place = loaded[rank].place
            assert again[rank].rule == "each rank keeps its own"
            assert loaded[rank].rule != "each rank keeps its own"
            assert same(loaded[rank].before, again[rank].before)
            for entry, value in loaded[rank].before.items():
                whole = source.read(entry.replace("fp8.", "fp8_local.", 1))
                moved = move_ranks(entry, whole, report.layout.dp, report.layout.tp)
                assert torch.equal(moved[place], value), entry
        by_rule = {row.rule for row in report.tensors if row.name.startswith("fp8_local.")}
        assert "kept" not in by_rule
        assert all(r.rule == "kept" for r in report.tensors if r.name[:10] != "fp8_local.")
    # And into a run whose ranks share their scales, and from there back.
    shared = ranks.run(
        leg,
        world_size=2,
        flags=(*BASE, *degrees()),
        iterations=0,
        load=first[0].saved,
        save=str(tmp_path / "shared"),
    )
    for entry, value in shared[0].before.items():
        whole = source.read(entry.replace("fp8.", "fp8_local.", 1))
        extreme = whole.amin() if entry.endswith(".scale") else whole.amax((0, 1))
        assert torch.equal(extreme, value), entry
    assert same(shared[0].before, shared[1].before)
    own = ranks.run(
        leg, world_size=2, flags=(*BASE, *degrees(2), OWN), iterations=0, load=shared[0].saved
    )
    assert all(same(part.before, shared[0].before) for part in own)
    assert own[0].rule == "one scale for all ranks, copied to each"


def save_unequal(flags: tuple[str, ...], root: str) -> None:
    """Ranks that share their scales, one of which has gone its own way."""
    training = start_training(flags)
    training.iterate(1)
    registry = training.model.registry
    assert registry is not None
    if training.mesh.dp_rank == 1:
        registry.amax_history[-1, 4] += 1.0
    training.save(root)


def test_shared_scales_that_differ_are_not_saved(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError) as failure:
        ranks.run(save_unequal, world_size=2, flags=(*BASE, *degrees()), root=str(tmp_path))
    text = str(failure.value)
    assert CheckpointError.__name__ in text
    assert "differs between ranks that share it, in 1 tensors: fp8.decoder.layers." in text
    assert list(tmp_path.iterdir()) == []
