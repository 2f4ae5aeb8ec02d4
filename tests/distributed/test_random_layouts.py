"""Random models at random pairs of layouts: what one saves, the other loads, bit for bit.

The hand-picked layouts of `test_layout_changes.py` divide their model evenly. Here sizes are odd,
shards uneven or empty, windows of length 1, embeddings tied or not, and any wire may be FP8.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megafp8.checkpoint import read_record
from megafp8.checkpoint.reshard import TargetLayout, reshard_checkpoint
from megafp8.config.cli import load_config
from megafp8.errors import MegaFP8Error
from megafp8.launch.dry_run import preflight
from tests.support.layouts import PARITY, SP, Curve, degrees, merge_stages, start_training
from tests.support.ranks import Ranks

RANKS = 4
# Beside delayed scaling, with its windows and scales of each rank's own.
RECIPES = ("tensorwise", "rowwise", "mxfp8")


@dataclass(frozen=True)
class Place:
    """A layout: the flags of a run, and what the offline tool is told."""

    flags: tuple[str, ...]
    target: TargetLayout

    @property
    def size(self) -> int:
        return self.target.world_size


@dataclass(frozen=True)
class Case:
    """A model with its precision, where it is trained, and where it goes on."""

    model: tuple[str, ...]
    home: Place
    other: Place

    def commands(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        for place in (self.home, self.other):
            yield place.size, (*PARITY, *self.model, *place.flags)


def some(rng: random.Random, chance: float, *flags: str) -> tuple[str, ...]:
    return flags if rng.random() < chance else ()


def draw_model(rng: random.Random) -> tuple[str, ...]:
    heads = rng.choice((4, 6, 8, 12))
    groups = rng.choice([n for n in (1, 2, 3, 4, 6, 8, 12) if heads % n == 0])
    recipe = rng.choice(("none", "delayed", "delayed", "delayed", *RECIPES))
    # mxfp8 needs multiples of 32 also along what a rank has of it.
    channels, ffn, sequence = rng.choice((8, 16)), rng.choice((96, 100, 144, 192)), 32
    if recipe == "mxfp8":
        heads, groups, channels, ffn, sequence = 4, 4, 64, 512, 128
    sizes = {
        "num-layers": rng.choice((1, 2, 3, 4, 6)),
        "hidden-size": heads * channels,
        "num-attention-heads": heads,
        "num-query-groups": groups,
        "ffn-hidden-size": ffn,
        "seq-length": sequence,
        "max-position-embeddings": sequence,
        "vocab-size": rng.choice((97, 255, 511)),
        "make-vocab-size-divisible-by": rng.choice((1, 16, 128)),
        "micro-batch-size": 1,
        "global-batch-size": 12,
    }
    flags = [token for name, size in sizes.items() for token in (f"--{name}", str(size))]
    flags += some(rng, 0.5, "--untie-embeddings-and-output-weights", "false")
    flags += some(rng, 0.3, "--normalization", "LayerNorm")
    flags += some(rng, 0.3, "--position-embedding-type", "learned_absolute")
    flags += some(rng, 0.3, "--disable-bias-linear", "false")
    flags += some(rng, 0.3, "--swiglu", "false")
    flags += some(rng, 0.2, "--qk-layernorm")
    flags += some(rng, 0.2, "--optimizer", "sgd")
    if recipe == "none":
        flags += ["--fp8-format", "none"]
    elif recipe == "delayed":
        flags += ["--fp8-amax-history-len", str(rng.choice((1, 4, 16)))]
        flags += some(rng, 0.3, "--no-fp8-reduce-amax", "--fp8-tp-comm", "none")
    else:
        flags += ["--fp8-recipe", recipe]
    return tuple(flags)


def draw_place(rng: random.Random, fp8: bool) -> Place:
    while True:
        tp, pp, fsdp, replicas = (rng.choice((1, 1, 2, 3, 4)) for _ in range(4))
        if tp * pp * fsdp * replicas <= RANKS:
            break
    flags, virtual, schedule = ["--fsdp-size", str(fsdp)], None, None
    if tp > 1:
        flags += some(rng, 0.6, SP)
    if pp > 1:
        virtual, schedule = rng.choice(((None, None), (1, None), (None, "zbv"), (None, "gpipe")))
    if virtual:
        flags += ["--num-layers-per-virtual-pipeline-stage", str(virtual)]
    if schedule:
        flags += ["--pipeline-schedule", schedule]
    if fp8 and fsdp > 1:
        flags += some(rng, 0.4, "--fp8-param-gather") + some(rng, 0.3, "--fp8-grad-reduce")
    target = TargetLayout(tp, pp, fsdp, replicas, virtual, schedule)
    return Place(degrees(tp, pp, *flags), target)


def draw(seed: int) -> Case:
    """Draw until a run would start at both layouts: most pairs do not divide their model."""
    rng = random.Random(seed)
    while True:
        model = draw_model(rng)
        fp8 = "none" not in model
        case = Case(model, draw_place(rng, fp8), draw_place(rng, fp8))
        try:
            for size, command in case.commands():
                preflight(load_config(list(command)), size)
        except MegaFP8Error:
            continue
        return case


@dataclass
class Leg:
    """What a rank held before it saved, where it saved, and the iteration after that."""

    held: dict[str, str]
    saved: str
    curve: Curve


def leg(flags: tuple[str, ...], load: str | None, save: str) -> Leg:
    """Load or train two iterations, save, train one more; a function for ranks."""
    training = start_training(flags, load)
    if load is None:
        training.iterate(2)
    # Not what is made anew in each forward: gathered weights, scales of other recipes than delayed.
    passing = "live." if "--fp8-recipe" not in flags else ("live.", "registry.")
    held = {k: v for k, v in training.digests().items() if not k.startswith(passing)}
    return Leg(held, training.save(save), training.iterate(1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_any_model_moves_from_any_layout_to_any_other(
    ranks: Ranks, tmp_path: Path, seed: int
) -> None:
    case = draw(seed)
    (size, command), (other_size, other_command) = case.commands()

    def run(world_size: int, flags: tuple[str, ...], load: str | None, name: str) -> list[Leg]:
        save = str(tmp_path / name)
        return ranks.run(leg, world_size=world_size, flags=flags, load=load, save=save)

    home = run(size, command, None, "home")
    report = reshard_checkpoint(Path(home[0].saved), tmp_path / "offline", case.other.target)
    online = run(other_size, other_command, home[0].saved, "online")
    offline = run(other_size, other_command, str(report.path), "from offline")

    assert [rank.held for rank in online] == [rank.held for rank in offline]
    assert repr(online[0].curve) == repr(offline[0].curve)  # NaN, too
    saved, written = read_record(Path(online[0].saved)), read_record(report.path)
    assert saved.layout == written.layout and saved.files.keys() == written.files.keys()
    if "--no-fp8-reduce-amax" in case.model:
        return  # scales of each rank's own change by rule: `test_rank_scales_runs.py`
    before = merge_stages([rank.held for rank in home])
    after = merge_stages([rank.held for rank in online])
    # Linears that are FP8 at one of the two layouts alone have scales there alone.
    alone = before.keys() ^ after.keys()
    assert all(name.startswith(("fp8.", "registry.")) for name in alone), alone
    common = before.keys() & after.keys()
    assert {n: before[n] for n in common} == {n: after[n] for n in common}
    if not alone:
        back = reshard_checkpoint(Path(online[0].saved), tmp_path / "back", case.home.target)
        crcs = {row.name: row.crc_after for row in back.tensors}
        assert crcs == {row.name: row.crc_before for row in report.tensors}
