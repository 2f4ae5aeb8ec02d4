"""Checkpoints know no backend: runs move between them, and between layouts and window lengths."""

from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import load_tensors, read_record
from tests.support.layouts import BOUNDS, PARITY, SP, degrees, deviations, merge_stages
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL, train

ALONE = (*PARITY, *SMALL, *degrees())
TP2 = (*PARITY, *SMALL, *degrees(2, 1, SP))


def checkpointed(digests: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in digests.items() if not name.startswith("live.")}


def test_native_te_native(ranks: Ranks, te_ranks: Ranks, tmp_path: Path) -> None:
    """Each leg starts bitwise where the last one ended; the whole is a native run within bounds."""
    (first,) = ranks.run(train, world_size=1, flags=ALONE, iterations=3, save=str(tmp_path / "a"))
    (second,) = te_ranks.run(
        train,
        world_size=1,
        flags=ALONE,
        iterations=3,
        te=True,
        load=first.saved,
        save=str(tmp_path / "b"),
    )
    (third,) = ranks.run(train, world_size=1, flags=ALONE, iterations=3, load=second.saved)
    assert second.before == first.after
    assert third.before == second.after != third.after
    (whole,) = ranks.run(train, world_size=1, flags=ALONE, iterations=9)
    joined = first.curve.losses + second.curve.losses + third.curve.losses
    for found, wanted in zip(joined, whole.curve.losses, strict=True):
        assert abs(found / wanted - 1) <= BOUNDS["fp8"][0]


def test_resumed_te_run_is_bitwise_the_same(te_ranks: Ranks, tmp_path: Path) -> None:
    straight = te_ranks.run(train, world_size=2, flags=TP2, iterations=6, te=True)
    half = te_ranks.run(train, world_size=2, flags=TP2, iterations=3, te=True, save=str(tmp_path))
    rest = te_ranks.run(train, world_size=2, flags=TP2, iterations=3, te=True, load=half[0].saved)
    for whole, again in zip(straight, rest, strict=True):
        assert again.curve.losses == whole.curve.losses[3:]
        assert again.after == whole.after


def test_te_tp2_to_one_rank(ranks: Ranks, te_ranks: Ranks, tmp_path: Path) -> None:
    two = te_ranks.run(train, world_size=2, flags=TP2, iterations=3, te=True, save=str(tmp_path))
    (te,) = te_ranks.run(train, world_size=1, flags=ALONE, iterations=3, te=True, load=two[0].saved)
    (native,) = ranks.run(train, world_size=1, flags=ALONE, iterations=3, load=two[0].saved)
    held = merge_stages([rank.after for rank in two])
    assert te.before == native.before == held
    loss, norm = deviations(te.curve, native.curve)
    assert loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1]


def scales(*digests: dict[str, str]) -> dict[str, str]:
    """Scales and windows alone, of all ranks together."""
    return {k: v for k, v in merge_stages(digests).items() if k.startswith("fp8.")}


def test_first_scales_of_weights_are_the_native_ones(
    ranks: Ranks, te_ranks: Ranks, tmp_path: Path
) -> None:
    """Those of the masters: in a fresh run, and in one that goes on in FP8 after BF16."""
    (native,) = ranks.run(train, world_size=1, flags=ALONE, iterations=0)
    te = te_ranks.run(train, world_size=2, flags=TP2, iterations=0, te=True)
    fresh = scales(native.before)
    assert scales(*(rank.before for rank in te)) == fresh
    bf16 = (*ALONE, "--fp8-format", "none")
    (saved,) = ranks.run(train, world_size=1, flags=bf16, iterations=2, save=str(tmp_path))
    loaded = {"flags": ALONE, "iterations": 1, "load": saved.saved}
    (native,) = ranks.run(train, world_size=1, **loaded)
    (other,) = te_ranks.run(train, world_size=1, te=True, **loaded)
    switched = scales(native.before)
    assert scales(other.before) == switched
    different = {name for name in fresh if fresh[name] != switched[name]}
    assert different and all(name.endswith(".weight.scale") for name in different)
    assert abs(other.curve.losses[0] / native.curve.losses[0] - 1) <= BOUNDS["fp8"][0]


def test_another_format_and_rule(ranks: Ranks, te_ranks: Ranks, tmp_path: Path) -> None:
    """Scales are chosen anew, with a window of another length and a cap, before the first step."""
    hybrid = te_ranks.run(train, world_size=2, flags=TP2, iterations=3, te=True, save=str(tmp_path))
    saved = scales(*(rank.after for rank in hybrid))
    for rule in (("--fp8-format", "e4m3"), ("--fp8-margin", "2", "--fp8-scale-cap", "9")):
        loaded = {"flags": (*ALONE, *rule), "iterations": 1, "load": hybrid[0].saved}
        (native,) = ranks.run(train, world_size=1, **loaded)
        (te,) = te_ranks.run(train, world_size=1, te=True, **loaded)
        assert scales(te.before) == scales(native.before)
        moved = {name for name, value in scales(te.before).items() if saved[name] != value}
        assert moved and all(name.endswith(".scale") for name in moved)
        assert all(".grad_output." in name for name in moved) is (rule[0] == "--fp8-format")
        assert abs(te.curve.grad_norms[0] / native.curve.grad_norms[0] - 1) <= BOUNDS["fp8"][1]


def windows(directory: str) -> dict[str, torch.Tensor]:
    record = read_record(Path(directory))
    names = [name for name in record.tensors if name.endswith(".amax_history")]
    tensors = {name: torch.zeros(record.tensors[name].shape) for name in names}
    load_tensors(Path(directory), tensors, lambda name: True)
    return tensors


def test_window_lengths(te_ranks: Ranks, ranks: Ranks, tmp_path: Path) -> None:
    """16 -> 4 keeps the newest four entries, 4 -> 1024 keeps them as the newest, oldest first."""

    def leg(length: int, iterations: int, load: str | None, name: str, te: bool) -> str:
        pool = te_ranks if te else ranks
        flags = (*ALONE, "--fp8-amax-history-len", str(length))
        (done,) = pool.run(
            train,
            world_size=1,
            flags=flags,
            iterations=iterations,
            te=te,
            load=load,
            save=str(tmp_path / name),
        )
        return done.saved

    long = leg(16, 6, None, "16", te=True)
    short = leg(4, 1, long, "4", te=True)
    longest = leg(1024, 1, short, "1024", te=True)
    through_native = leg(1024, 1, short, "native", te=False)
    before, between, after = windows(long), windows(short), windows(longest)
    assert before and before.keys() == between.keys() == after.keys()
    for name, window in before.items():
        assert (window > 0).sum() == 6, name  # one entry per optimizer step, not per micro-batch
        assert between[name].shape == (4,) and torch.equal(between[name][:3], window[-3:])
        assert after[name].shape == (1024,)
        assert torch.equal(after[name][-5:-1], between[name])
        assert after[name][-1] > 0 and not after[name][:-5].any()
        assert torch.equal(windows(through_native)[name][:-1], after[name][:-1])


@pytest.mark.parametrize("te", [False, True], ids=["native", "te"])
def test_no_pickle_in_checkpoints(ranks: Ranks, te_ranks: Ranks, tmp_path: Path, te: bool) -> None:
    pool = te_ranks if te else ranks
    (done,) = pool.run(train, world_size=1, flags=ALONE, iterations=1, te=te, save=str(tmp_path))
    names = list(read_record(Path(done.saved)).tensors)
    assert names and not any("extra_state" in name for name in names)
    assert sum(name.startswith("fp8.") for name in names) == 2 * 4 * 3 * 2
