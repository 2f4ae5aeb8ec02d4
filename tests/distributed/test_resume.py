"""A resumed run is the run that never stopped, at the same layout and, within rounding, at any."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import load_tensors, read_record
from megafp8.config.shape import EMBEDDING, OUTPUT
from tests.support.layouts import (
    BOUNDS,
    PARITY,
    PRECISIONS,
    QUIET,
    SP,
    Curve,
    Training,
    degrees,
    deviations,
    digest,
    merge_stages,
    start_training,
)
from tests.support.limits import slow
from tests.support.ranks import Ranks

ZBV = ("--pipeline-schedule", "zbv")
TIED = ("--untie-embeddings-and-output-weights", "false")
DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
BATCH = ("--global-batch-size", "8")
HALF = ("--num-layers", "2", *BATCH)
FP32 = PRECISIONS["fp32"]
TENSORWISE = ("--fp8-recipe", "tensorwise")
# Grows every other step, so that neither the scale nor its count is at its start in the middle.
FP16 = (
    *("--bf16", "false", "--fp16", "--fp8-format", "none"),
    *("--initial-loss-scale", "256", "--loss-scale-window", "2"),
)
WIRES = ("--fp8-tp-comm", "all", "--fp8-param-gather", "--fp8-grad-reduce")


@dataclass
class Leg:
    """Some iterations of a run on one rank.

    Attributes:
        before, after: digests of everything a checkpoint holds, at the start and at the end.
        curve: the iterations.
        saved: the checkpoint written at the end, if any.
        scale_error: largest |scale * scale_inv - 1| at the start, in units of the last place.
    """

    before: dict[str, str]
    after: dict[str, str]
    curve: Curve
    saved: str
    scale_error: float


def leg(
    flags: tuple[str, ...], iterations: int, load: str | None = None, save: str | None = None
) -> Leg:
    """Train from scratch or from a checkpoint, perhaps save; a function for ranks."""
    torch.manual_seed(len(load or ""))  # nothing may come from the default generator
    training = start_training(flags, load)
    before, error = training.digests(), _scale_error(training)
    curve = training.iterate(iterations)
    saved = training.save(save) if save is not None else ""
    return Leg(before, training.digests(), curve, saved, error)


def _scale_error(training: Training) -> float:
    registry = training.model.registry
    if registry is None:
        return 0.0
    product = registry.scale.double() * registry.scale_inv.double()
    return float((product - 1.0).abs().max()) / torch.finfo(torch.float32).eps


def uninterrupted(flags: tuple[str, ...], at: int, iterations: int, save: str) -> tuple[Curve, Leg]:
    """Train `iterations`, saving after `at`: (the curve up to there, the rest)."""
    training = start_training(flags)
    first = training.iterate(at)
    saved, before = training.save(save), training.digests()
    rest = training.iterate(iterations - at)
    return first, Leg(before, training.digests(), rest, saved, 0.0)


@pytest.mark.parametrize(
    ("size", "flags", "half"),
    [
        slow(4, (*PARITY, *BATCH, *degrees(2, 2, SP)), 3),
        slow(2, (*PARITY, *BATCH, *degrees()), 3),
        (4, (*PARITY, *HALF, *DROPOUT, *degrees(2, 2, SP)), 3),
        (2, (*PARITY, *HALF, *DROPOUT, *degrees()), 3),
        slow(2, (*PARITY, *HALF, *DROPOUT, *degrees(2, 1)), 3),
        (4, (*PARITY, *HALF, *TIED, *degrees(1, 2)), 3),
        (2, (*PARITY, *BATCH, *TIED, *ZBV, *degrees(1, 2)), 3),
        slow(4, (*PARITY, *HALF, "--fsdp-size", "2", *degrees()), 3),
        (4, (*PARITY, *HALF, *WIRES, *degrees(2, 1, SP)), 3),
        slow(4, (*PARITY, *HALF, *WIRES, *degrees(1, 2)), 3),
        (1, (*PARITY, *HALF, *FP16, *degrees()), 3),
        (2, (*PARITY, *HALF, *TENSORWISE, "--fp8-param-gather", *degrees()), 3),
    ],
    ids=[
        "tp2pp2",
        "fsdp2",
        "tp2pp2-dropout",
        "fsdp2-dropout",
        "tp2-dropout",
        "pp2fsdp2-tied",
        "zbv-tied",
        "hsdp",
        "tp2fsdp2-fp8-wires",
        "pp2fsdp2-fp8-wires",
        "fp16",
        "fsdp2-tensorwise-gathered",
    ],
)
def test_resumed_run_is_bitwise_the_same(
    ranks: Ranks, tmp_path: Path, size: int, flags: tuple[str, ...], half: int
) -> None:
    straight = ranks.run(
        uninterrupted,
        world_size=size,
        flags=flags,
        at=half,
        iterations=2 * half,
        save=str(tmp_path / "a"),
    )
    checkpoint = straight[0][1].saved
    resumed = ranks.run(
        leg, world_size=size, flags=flags, iterations=half, load=checkpoint, save=str(tmp_path)
    )
    for (_, rest), again in zip(straight, resumed, strict=True):
        assert again.before == rest.before
        assert again.curve.losses == rest.curve.losses
        assert again.curve.grad_norms == rest.curve.grad_norms
        assert again.curve.loss_scales == rest.curve.loss_scales
        assert again.after == rest.after
        assert 0.0 <= again.scale_error <= 1.0
        assert again.before != again.after
    record = read_record(Path(resumed[0].saved))
    assert record.iteration == 2 * half
    stateful = "--fp16" not in flags and "tensorwise" not in flags
    assert any(name.startswith("fp8.") for name in record.tensors) is stateful


def contents(directory: str | Path) -> dict[str, str]:
    """Digests of the stored tensors, read without a process group."""
    record = read_record(Path(directory))
    tensors = {
        name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in record.tensors.items()
    }
    assert load_tensors(Path(directory), tensors) == []
    return {name: digest(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("size", "flags"), [(4, degrees(2, 2, SP)), (4, degrees(1, 2, *TIED))], ids=["tp2pp2", "tied"]
)
def test_saving_what_was_loaded_gives_the_same_tensors(
    ranks: Ranks, tmp_path: Path, size: int, flags: tuple[str, ...]
) -> None:
    command = (*PARITY, *HALF, *flags)
    first = ranks.run(leg, world_size=size, flags=command, iterations=2, save=str(tmp_path / "a"))
    second = ranks.run(
        leg,
        world_size=size,
        flags=command,
        iterations=0,
        load=first[0].saved,
        save=str(tmp_path / "b"),
    )
    saved = contents(first[0].saved)
    assert contents(second[0].saved) == saved
    assert len(saved) > 30
    # And the checkpoint is what the ranks held.
    held = merge_stages([rank.after for rank in first])
    assert {name: held[name] for name in saved} == saved


# ------------------------------------------------------------------------------ other layouts


def stored(digests: dict[str, str]) -> dict[str, str]:
    """Leave out what is not one global tensor in the checkpoint."""
    return {
        name: value
        for name, value in digests.items()
        if not name.startswith(("live.", "registry."))
    }


@pytest.mark.parametrize("precision", [slow("fp32"), "fp8"])
def test_a_run_moves_from_layout_to_layout(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    """tp2 x pp2, then fsdp4, then one rank: one curve, within the bounds of parity."""
    base = (*PARITY, *QUIET, *BATCH, *PRECISIONS[precision])
    moves = [(4, degrees(2, 2, SP)), (4, degrees()), (1, degrees())]
    joined, load, held = Curve(), None, None
    for size, flags in moves:
        parts = ranks.run(
            leg,
            world_size=size,
            flags=(*base, *flags),
            iterations=4,
            load=load,
            save=str(tmp_path),
        )
        if held is not None:
            assert stored(merge_stages([rank.before for rank in parts])) == held
        held = stored(merge_stages([rank.after for rank in parts]))
        load = parts[0].saved
        joined.losses += parts[0].curve.losses
        joined.grad_norms += parts[0].curve.grad_norms
    wanted = ranks.run(leg, world_size=1, flags=(*base, *degrees()), iterations=12)[0].curve
    assert len(joined.losses) == len(wanted.losses)
    loss, norm = deviations(joined, wanted)
    assert loss <= BOUNDS[precision][0] and norm <= BOUNDS[precision][1], (loss, norm)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, degrees(1, 2)), (1, degrees())),
        ((1, degrees()), (2, degrees(1, 2))),
        ((2, degrees(1, 2)), (2, degrees(1, 2, *ZBV))),
        ((2, degrees(1, 2, *ZBV)), (4, degrees(2, 2, SP))),
    ],
    ids=["pp2-one", "one-pp2", "pp2-zbv", "zbv-tp2pp2"],
)
def test_tied_embeddings_move_between_layouts(
    ranks: Ranks,
    tmp_path: Path,
    first: tuple[int, tuple[str, ...]],
    second: tuple[int, tuple[str, ...]],
) -> None:
    base = (*PARITY, *BATCH, *FP32, *TIED)
    one = ranks.run(
        leg, world_size=first[0], flags=(*base, *first[1]), iterations=2, save=str(tmp_path)
    )
    two = ranks.run(
        leg, world_size=second[0], flags=(*base, *second[1]), iterations=2, load=one[0].saved
    )
    before = merge_stages([rank.before for rank in two])
    assert stored(before) == stored(merge_stages([rank.after for rank in one]))
    assert before[f"live.{EMBEDDING}"] == before[f"live.{OUTPUT}"] == before[EMBEDDING]
    after = merge_stages([rank.after for rank in two])
    assert after[f"live.{EMBEDDING}"] == after[f"live.{OUTPUT}"] != before[EMBEDDING]
    wanted = ranks.run(leg, world_size=1, flags=(*base, *degrees()), iterations=4)[0].curve
    assert two[0].curve.losses == pytest.approx(wanted.losses[2:], rel=1e-5)
    assert two[0].curve.grad_norms == pytest.approx(wanted.grad_norms[2:], rel=1e-4)


# ------------------------------------------------------------------------------ uneven shards

# Hidden size 4 over 3 ranks: rows 2, 2, 0; query and key norms of 2 elements: 1, 1, 0.
UNEVEN = (
    *("--num-layers", "2", "--hidden-size", "4", "--num-attention-heads", "2"),
    *("--ffn-hidden-size", "10", "--seq-length", "16", "--max-position-embeddings", "16"),
    *("--position-embedding-type", "learned_absolute", "--qk-layernorm"),
    *("--make-vocab-size-divisible-by", "2", "--hidden-dropout", "0", "--attention-dropout", "0"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "49"),
    *("--lr", "1e-3", "--micro-batch-size", "2", "--global-batch-size", "12", "--train-iters", "9"),
)
# FP8 needs multiples of 16; 16 rows over 3 ranks are 6, 6 and 4.
UNEVEN_FP8 = (
    *("--bf16", "--fp8-format", "hybrid", "--hidden-size", "16", "--num-attention-heads", "8"),
    *("--ffn-hidden-size", "16"),
)


def replaced(flags: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags (each with one value) with others in place of those of the same name."""
    values: dict[str, tuple[str, ...]] = {}
    for group in (flags, others):
        for word in group:
            if word.startswith("--"):
                current = values[word] = ()
                name = word
            else:
                values[name] = (*current, word)
    return tuple(word for name, rest in values.items() for word in (name, *rest))


def shard_rows(flags: tuple[str, ...]) -> dict[str, int]:
    """Rows of this rank's shard of each parameter."""
    training = start_training(flags)
    return {e.name: e.shard.shape[0] for e in training.step.gradients.entries}


def test_uneven_shards_are_uneven(ranks: Ranks) -> None:
    """Otherwise the next test would show little."""
    rows = ranks.run(shard_rows, world_size=3, flags=UNEVEN)
    attention = "decoder.layers.1.self_attention"
    assert [rank[f"{attention}.linear_proj.weight"] for rank in rows] == [2, 2, 0]
    assert [rank[f"{attention}.q_layernorm.weight"] for rank in rows] == [1, 1, 0]
    assert [rank["embedding.position_embeddings.weight"] for rank in rows] == [6, 6, 4]


@pytest.mark.parametrize("precision", [slow("fp32"), "fp8"])
def test_uneven_shards_resume(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    flags = UNEVEN if precision == "fp32" else replaced(UNEVEN, UNEVEN_FP8)
    straight = ranks.run(
        uninterrupted, world_size=3, flags=flags, at=3, iterations=6, save=str(tmp_path)
    )
    checkpoint, wanted = straight[0][1].saved, straight[0][1].curve
    for size in (3, 2, 1):
        again = ranks.run(leg, world_size=size, flags=flags, iterations=3, load=checkpoint)
        before = stored(merge_stages([rank.before for rank in again]))
        assert before == stored(merge_stages([rank[1].before for rank in straight])), size
        curve = again[0].curve
        if size == 3:
            assert curve.losses == wanted.losses and curve.grad_norms == wanted.grad_norms
            assert [rank.after for rank in again] == [rank[1].after for rank in straight]
        loss, norm = deviations(curve, wanted)
        assert loss <= BOUNDS[precision][0] and norm <= BOUNDS[precision][1], (size, loss, norm)


# ------------------------------------------------------------------------- other precision


@dataclass
class Loaded:
    """A run right after loading: digests, log lines about it, scales, and its first loss."""

    digests: dict[str, str]
    lines: list[str]
    scales: tuple[float, float, float]
    loss: float


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname}: {record.getMessage()}")


def load_and_step(flags: tuple[str, ...], load: str) -> Loaded:
    """Load, note what was said and which scales resulted, and run one iteration."""
    training = start_training(flags)
    handler, logger = _Lines(), logging.getLogger("megafp8")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        training.load(load)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    registry = training.model.registry
    scales = (1.0, 1.0, 0.0)
    if registry is not None:
        scales = (
            float(registry.scale.min()),
            float(registry.scale.max()),
            float(registry.amax_history.max()),
        )
    digests = training.digests()
    return Loaded(digests, handler.lines, scales, training.one_step().loss)


def save_without_scales(flags: tuple[str, ...], iterations: int, save: str) -> Leg:
    """As an FP8 run that lost its scale state: the checkpoint has none of the `fp8.` entries."""
    training = start_training(flags)
    curve = training.iterate(iterations)
    assert training.model.registry is not None
    digests = training.digests()
    training.model.registry.tensors = dict  # type: ignore[method-assign]
    return Leg({}, digests, curve, training.save(save), 0.0)


def weights(digests: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in stored(digests).items() if not k.startswith("fp8.")}


@pytest.mark.parametrize(
    ("source", "target"), [("bf16", "fp8"), ("fp8", "bf16"), ("fp8 without scales", "fp8")]
)
def test_precision_may_change_on_resume(
    ranks: Ranks, tmp_path: Path, source: str, target: str
) -> None:
    base, linears = (*PARITY, *QUIET, *HALF, *degrees(1, 2)), 4  # linears on each of two stages
    lost = "without" in source
    saved = ranks.run(
        save_without_scales if lost else leg,
        world_size=2,
        flags=(*base, *PRECISIONS[source.split()[0]]),
        iterations=3,
        save=str(tmp_path),
    )
    checkpoint = saved[0].saved
    names = read_record(Path(checkpoint)).tensors
    assert any(name.startswith("fp8.") for name in names) is (source == "fp8")
    found = ranks.run(
        load_and_step, world_size=2, flags=(*base, *PRECISIONS[target]), load=checkpoint
    )
    for before, after in zip(saved, found, strict=True):
        assert weights(after.digests) == weights(before.after)
        assert abs(after.loss / before.curve.losses[-1] - 1.0) < 0.05
        about = [line for line in after.lines if "scale state" in line]
        if target == "fp8":
            smallest, largest, amax = after.scales
            assert (smallest, amax) == (1.0, 0.0) and largest > 100.0, "of masters, of nothing else"
            assert len(about) == 1 and about[0].startswith("WARNING"), after.lines
            assert f"no scale state for {3 * linears} of" in about[0], about
        else:
            dropped = [line for line in after.lines if "not used by this run" in line]
            # Two stages with 4 linears of 3 tensors, each with a scale and a history.
            assert len(dropped) == 1 and f"{2 * linears * 3 * 2} stored tensors" in dropped[0]
            assert about == []


def test_ranks_are_the_same_processes_but_not_the_same_objects(ranks: Ranks) -> None:
    """What is compared above must come from the checkpoint: a fresh model starts elsewhere."""
    flags = (*PARITY, *HALF, *degrees())
    first, second = (ranks.run(leg, world_size=1, flags=flags, iterations=1)[0] for _ in range(2))
    assert first.before == second.before != first.after == second.after
