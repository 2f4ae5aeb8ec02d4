"""FP8's weight gradients keep near BF16's, and faults that no loss shows do not."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import Ranks
from tests.tools import fp8_gradients
from tests.tools.fp8_gradients import (
    CONTROLS,
    RECIPES,
    TRACKS,
    WIRES,
    Figures,
    outside,
    run_track,
)

ROOT = Path(__file__).resolve().parents[2]
# None of the seeds that bands and bounds come from.
SEED, ITERATIONS = 1234, 8
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [*RECIPES, *(pytest.param(wire, marks=[] if wire == "wires-all" else SLOW) for wire in WIRES)],
)
def test_recipe_or_wire_is_near_bf16(ranks: Ranks, name: str) -> None:
    bounds = TRACKS[name].bounds
    assert bounds is not None
    figures = run_track(ranks, name, SEED, ITERATIONS)
    assert not outside(figures, bounds), figures


@pytest.mark.parametrize("name", CONTROLS)
def test_a_fault_breaks_a_bound(ranks: Ranks, name: str) -> None:
    """Another role's scale and a stale scale_inv are planted where casts ask the registry."""
    bounds = RECIPES[CONTROLS[name].fault_in].bounds
    assert bounds is not None
    figures = run_track(ranks, name, SEED, ITERATIONS)
    assert outside(figures, bounds), figures


def made(sqnr_db: float = 22.0, underflow: float = 0.1) -> Figures:
    return {"loss": 2.0, "sqnr_db": sqnr_db, "cosine": 0.999, "underflow": underflow}


@pytest.mark.parametrize(
    ("recipe", "fault", "good"),
    [
        ((22.0, 22.2, 22.4), made(16.0), True),
        ((22.0, 22.2, 22.4), made(underflow=9.0), True),
        ((22.0, 22.2, 22.4), made(), False),
        ((22.0, 14.0, 22.4), made(11.0), False),  # a recipe out of bounds
        ((19.0, 22.0, 25.0), made(16.0), False),  # within the recipe's band over seeds
        ((22.0, 22.2, math.nan), made(16.0), False),
        ((22.0, 22.2, 22.4), made(math.nan), True),
    ],
)
def test_table_wants_recipes_inside_and_faults_outside(
    recipe: tuple[float, ...], fault: Figures, good: bool
) -> None:
    results = {
        "bf16": {str(seed): {"loss": 2.0} for seed in range(3)},
        "delayed hybrid": {str(seed): made(sqnr_db) for seed, sqnr_db in enumerate(recipe)},
        "margin 10, delayed hybrid": {str(seed): fault for seed in range(3)},
    }
    lines, found = fp8_gradients.table(results)
    assert found == good, lines
    assert len(lines) == 5


def test_bands_over_seeds() -> None:
    """Mean 3, s sqrt(2.5), t 2.776 for four degrees of freedom."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert fp8_gradients.prediction_band(values) == pytest.approx(2.776 * math.sqrt(2.5 * 1.2))
    assert fp8_gradients.mean_band(values) == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert math.isnan(fp8_gradients.prediction_band([1.0]))


def test_only_the_section_is_written_anew() -> None:
    document = "# FP8\n\n## What it costs in loss\n\nlittle\n"
    once = fp8_gradients.replaced(document, ["| old |"])
    twice = fp8_gradients.replaced(once, ["| new |"])
    assert twice == once.replace("| old |", "| new |")
    assert twice.startswith("# FP8\n\n## What it costs in a gradient\n\nA loss")
    assert twice.endswith("| new |\n\n## What it costs in loss\n\nlittle\n")


@pytest.mark.slow
def test_every_track_over_three_seeds() -> None:
    """Recipes and wires inside, faults outside, of bounds and of bands over seeds."""
    tool = ROOT / "tests/tools/fp8_gradients.py"
    subprocess.run([sys.executable, str(tool), "--seeds", "11", "12", "13"], check=True, cwd=ROOT)
