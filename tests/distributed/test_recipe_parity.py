"""Every FP8 recipe at tp 2 with sequence parallelism, fsdp 2 and pp 2 follows one rank, and BF16.

The model is the smallest whose linears fit 128x128 blocks on two ranks.
"""

from collections.abc import Callable

import pytest

from megafp8.launch.step_traffic import step_bytes
from tests.support.layouts import (
    BOUNDS,
    PARITY,
    QUIET,
    SP,
    Curve,
    degrees,
    deviations,
    start_training,
)
from tests.support.ranks import Ranks

ITERATIONS = 3
SIZES = "--num-layers 2 --hidden-size 256 --seq-length 64 --micro-batch-size 4"
SMALL = (*PARITY, *SIZES.split(), "--max-position-embeddings", "64", "--global-batch-size", "16")
RECIPES = {
    "delayed-micro-batch": ("delayed", "e4m3", "--fp8-amax-window", "micro-batch"),
    "tensorwise": ("tensorwise", "hybrid"),
    "rowwise": ("rowwise", "e4m3"),
    "rowwise_with_gw_hp": ("rowwise_with_gw_hp", "e4m3"),
    "blockwise": ("blockwise", "e4m3"),
    "mxfp8": ("mxfp8", "e4m3"),
    "mxfp8-hybrid": ("mxfp8", "hybrid"),
}
LAYOUTS = {
    "tp2 + sp": (2, degrees(2, 1, SP)),
    "fsdp2": (2, degrees()),
    "pp2": (2, degrees(1, 2)),
}


def command(recipe: str, layout: tuple[str, ...], *more: str) -> tuple[str, ...]:
    name, fmt, *flags = RECIPES[recipe]
    return (*SMALL, "--fp8-recipe", name, "--fp8-format", fmt, *flags, *layout, *more)


def curve(flags: tuple[str, ...]) -> Curve:
    training = start_training(flags)
    assert {linear.precision for linear in training.plan.linears} == {"fp8"}
    assert len(training.plan.linears) == 8
    return training.iterate(ITERATIONS)


@pytest.fixture(scope="module")
def one_rank(ranks: Ranks) -> Callable[[str], Curve]:
    known: dict[str, Curve] = {}

    def run(recipe: str) -> Curve:
        if recipe not in known:
            flags = command(recipe, degrees())
            known[recipe] = ranks.run(curve, world_size=1, flags=flags)[0]
        return known[recipe]

    return run


# fsdp and pp change no cast: one recipe with a scale a tensor and one with blocks stand for all.
DEFAULT = {(recipe, "tp2 + sp") for recipe in RECIPES}
DEFAULT |= {(recipe, layout) for recipe in ("tensorwise", "mxfp8") for layout in LAYOUTS}
COMBINATIONS = [
    pytest.param(recipe, layout, marks=[] if (recipe, layout) in DEFAULT else pytest.mark.slow)
    for layout in LAYOUTS
    for recipe in RECIPES
    if (recipe, layout) != ("delayed-micro-batch", "pp2")  # refused; see the checks' tests
]


@pytest.mark.parametrize(("recipe", "layout"), COMBINATIONS)
def test_recipe_at_two_ranks_equals_one(
    ranks: Ranks, one_rank: Callable[[str], Curve], recipe: str, layout: str
) -> None:
    world_size, degree_flags = LAYOUTS[layout]
    wanted = one_rank(recipe)
    answers = ranks.run(curve, world_size=world_size, flags=command(recipe, degree_flags))
    for answer in answers:
        loss, norm = deviations(answer, wanted)
        assert loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1], (loss, norm)
        assert not any(answer.skipped)


LOSS_ITERATIONS = 12
SLOW = pytest.mark.slow


def losses(flags: tuple[str, ...], precision: str = "fp8") -> list[float]:
    training = start_training(flags)
    assert {linear.precision for linear in training.plan.linears} == {precision}
    return training.iterate(LOSS_ITERATIONS).losses


WIRES = ("--fp8-tp-comm", "all", "--fp8-grad-reduce", "--fp8-grad-error-feedback")
WIRED = [
    pytest.param(recipe, marks=[] if recipe == "blockwise" else pytest.mark.slow)
    for recipe in RECIPES
    if recipe not in ("delayed-micro-batch", "tensorwise")  # test_fp8_wires.py
]


@pytest.mark.parametrize("recipe", WIRED)
def test_recipe_with_fp8_reductions_follows_one_rank(
    ranks: Ranks, one_rank: Callable[[str], Curve], recipe: str
) -> None:
    """Tp 2 x fsdp 2: reduce-scatters of activations and gradients as FP8, whatever the recipe."""
    flags = command(recipe, degrees(2, 1, SP), *WIRES)
    found = ranks.run(curve, world_size=4, flags=flags)
    for other in found[1:]:
        assert (other.losses, other.grad_norms) == (found[0].losses, found[0].grad_norms)
    for sent in found[0].comm_bytes:
        assert set(sent["tp_linear_reduce_scatter"]) == {"uint8"}
        assert set(sent["fsdp_block_reduce_scatter"]) == {"uint8"}
    loss, norm = deviations(found[0], one_rank(recipe))
    assert loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1], (loss, norm)


@pytest.fixture(scope="module")
def bf16_losses(ranks: Ranks) -> list[float]:
    flags = (*SMALL, *QUIET, "--fp8-format", "none", *degrees())
    (wanted,) = ranks.run(losses, world_size=1, flags=flags, precision="bf16")
    assert wanted[0] - wanted[-1] > 0.3, wanted
    return wanted


LEARNS = [
    pytest.param(
        recipe, marks=[] if recipe in ("delayed-micro-batch", "mxfp8") else pytest.mark.slow
    )
    for recipe in RECIPES
]


@pytest.mark.parametrize("recipe", LEARNS)
def test_a_recipe_learns_as_bf16_does(ranks: Ranks, bf16_losses: list[float], recipe: str) -> None:
    """`tests/tools/fp8_loss.py --tracks recipes` compares them over 300 iterations on text."""
    (found,) = ranks.run(losses, world_size=1, flags=command(recipe, degrees(), *QUIET))
    pairs = zip(found, bf16_losses, strict=True)
    assert max(abs(a / b - 1.0) for a, b in pairs) < 0.01, (found, bf16_losses)


def counted_and_computed(flags: tuple[str, ...]) -> tuple[int, int]:
    """Bytes of the gathers around linears in an iteration: counted, and as a dry run has them."""
    training = start_training(flags)
    curve = training.iterate(1)
    computed = step_bytes(training.config, training.shape, training.plan, training.mesh.layout)
    kind = "tp_linear_all_gather"
    return sum(curve.comm_bytes[0][kind].values()), computed[kind]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_scales_that_travel_are_counted_and_known_to_a_dry_run(ranks: Ranks, recipe: str) -> None:
    """Two codes for an input, one or two for an output gradient, each with its scales; or BF16."""
    layers, linears, tokens, hidden, batches = 2, 2, 128, 256, 4
    values = tokens * hidden
    scales = {"tensorwise": 0, "rowwise": 4 * tokens, "blockwise": values // 32}
    scales["mxfp8"] = values // 32
    cast = values + scales[recipe]
    inputs = cast + (2 * values if recipe == "rowwise" else cast)
    gradients = {"tensorwise": cast, "rowwise": 2 * values}.get(recipe, 2 * cast)
    wanted = layers * linears * batches * 2 * (inputs + gradients)
    flags = command(recipe, degrees(2, 1, SP))
    for answer in ranks.run(counted_and_computed, world_size=2, flags=flags):
        assert answer == (wanted, wanted)
    flags = command(recipe, degrees(2, 1, SP), "--fp8-tp-comm", "none")
    for counted, computed in ranks.run(counted_and_computed, world_size=2, flags=flags):
        assert counted == computed and counted > wanted * (1 if recipe == "rowwise" else 0.9)
