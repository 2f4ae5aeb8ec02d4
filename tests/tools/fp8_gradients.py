"""Compares FP8's weight gradients with BF16's over several seeds, with faults that must show.

python tests/tools/fp8_gradients.py [--seeds 1 2 3 4 5] [--tracks recipes controls wires ...]
                                    [--iterations 20] [--results gradients.json]
                                    [--write docs/fp8.md]

With --results the figures are kept in a file, and what is in it is not run again: one file for each
--iterations. --write replaces the section of the document. Exit code 1: a recipe or wire breaks a
bound, or a fault breaks none of the recipe's. A track takes seconds a seed, with 4 ranks a minute.
"""

import argparse
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

# Before torch is imported: the ranks inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.fidelity import another_roles_scale, measure, stale_scale_inv
from tests.support.layouts import PARITY, SP, degrees, train_curve
from tests.support.ranks import Ranks
from tests.tools.fp8_loss import OF_WIRES

ITERATIONS = 20
SETTING = "--num-layers 2 --init-method-std 0.02 --lr 1e-3 --global-batch-size 8"
ALONE = (*degrees(), "--micro-batch-size", "8")
SPLIT = (*degrees(2, 1, SP), "--micro-batch-size", "4")  # tp 2 x fsdp 2 on 4 ranks
MEASURES = ("sqnr_db", "cosine", "underflow")
# Student's t, 0.975 quantile, by degrees of freedom (NIST/SEMATECH e-Handbook, 1.3.6.7.2).
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
HEADING, NEXT_HEADING = "## What it costs in a gradient", "## What it costs in loss"
INTRODUCTION = """\
A loss forgives much: FP8 without any scaling reaches BF16's. So weight gradients are compared with
those that BF16 gives for the same weights and samples, at the same layout. The parity preset with 2
blocks, `--init-method-std 0.02`, a learning rate of 1e-3 and 8 generated samples an iteration is
trained in FP8 for 20 iterations; the wires at TP 2 x FSDP 2. Written by

    python tests/tools/fp8_gradients.py --write docs/fp8.md

which ends with exit code 1 if a recipe or wire breaks a bound, or a fault breaks none.

- SQNR and cosine are those of a linear's weight gradient, mean over iterations 11, 14, 17 and 20;
  the worst linear counts. A fused one counts by its parts: in a common norm q and k, whose
  gradients are the smallest, would not be seen.
- Underflow is the share of a tensor's values that the cast flushed to zero in these iterations; the
  worst tensor counts.
- Loss is the mean of the last 5 iterations.
- The band after ± is the two-sided 95 % t interval for one more seed, `t s sqrt(1 + 1/n)` with t
  the 0.975 quantile for n - 1 degrees of freedom (Hahn and Meeker, *Statistical Intervals*,
  chapter 4). Against BF16: mean difference of the runs with the same seed, with the interval of
  that mean, `t s / sqrt(n)`.
- Bounds are in brackets. A fault is outside in a measure in which every seed breaks the recipe's
  bound and lies outside the recipe's band.
"""

Bounds = dict[str, float]
Figures = dict[str, float]
Results = dict[str, dict[str, Figures]]  # track, seed


def bounds(sqnr_db: float, cosine: float, underflow: float) -> Bounds:
    """Return the least SQNR in dB, the least cosine and the largest underflow in percent."""
    return dict(zip(MEASURES, (sqnr_db, cosine, underflow), strict=True))


@dataclass(frozen=True)
class Track:
    """One kind of run.

    Attributes:
        flags: beside the setting's.
        layout: flags of it.
        bounds: of a recipe or wire; None of BF16 and of controls.
        fault_in: of a control: the recipe within whose bounds it must not lie.
        defect: what is planted in a control, if flags do not do it.
    """

    flags: tuple[str, ...]
    layout: tuple[str, ...] = ALONE
    bounds: Bounds | None = None
    fault_in: str = ""
    defect: str = ""

    @property
    def ranks(self) -> int:
        """Processes."""
        return 1 if self.layout == ALONE else 4

    @property
    def bf16(self) -> str:
        """The BF16 run with the same layout."""
        return "bf16" if self.ranks == 1 else "wires-bf16"


def fp8(fmt: str, recipe: str = "delayed", *more: str) -> tuple[str, ...]:
    return ("--fp8-format", fmt, "--fp8-recipe", recipe, *more)


DEFECTS = {"another role's scale": another_roles_scale, "stale scale_inv": stale_scale_inv}
# Bounds are the near edges of the bands over seeds 1 to 5 (docs/fp8.md), rounded away from them.
RECIPES = {
    f"{recipe} {fmt}": Track(fp8(fmt, recipe), bounds=bounds(*limits))
    for recipe, fmt, *limits in (
        ("delayed", "hybrid", 17.5, 0.990, 0.2),
        ("delayed", "e4m3", 15.0, 0.989, 4.0),
        ("tensorwise", "hybrid", 19.0, 0.994, 0.2),
        ("rowwise", "e4m3", 17.0, 0.992, 0.2),
        ("rowwise_with_gw_hp", "e4m3", 17.5, 0.992, 0.2),
        ("blockwise", "e4m3", 18.5, 0.992, 0.2),
        ("mxfp8", "e4m3", 19.0, 0.993, 0.2),
    )
}
CONTROLS = {
    f"{fault}, {recipe}": Track((*RECIPES[recipe].flags, *flags), fault_in=recipe, defect=defect)
    for fault, flags, defect in (
        ("no scaling", ("--fp8-scale-cap", "1"), ""),
        ("margin 10", ("--fp8-margin", "10"), ""),
        *((name, (), name) for name in DEFECTS),
    )
    for recipe in ("delayed hybrid", "delayed e4m3")
}
WIRES = {
    name: Track(fp8("hybrid", "delayed", *OF_WIRES[name].flags), SPLIT, bounds(*limits))
    for name, *limits in (
        ("wires-none", 16.0, 0.988, 0.2),
        ("wires-tp-comm-all", 16.5, 0.980, 0.2),
        ("wires-param-gather", 15.0, 0.982, 0.2),
        ("wires-grad-reduce", 17.0, 0.988, 0.2),
        ("wires-grad-reduce-feedback", 16.5, 0.988, 0.2),
        ("wires-all", 16.5, 0.986, 0.2),
    )
}
GROUPS = {"recipes": RECIPES, "controls": CONTROLS, "wires": WIRES}
TRACKS = {track.bf16: Track(("--fp8-format", "none"), track.layout) for track in WIRES.values()}
TRACKS = {"bf16": Track(("--fp8-format", "none"))} | TRACKS | RECIPES | CONTROLS | WIRES


def run_track(ranks: Ranks, name: str, seed: int, iterations: int = ITERATIONS) -> Figures:
    """Run one track with one seed; return its loss, and of an FP8 run the measures.

    The loss is the mean of the last quarter; gradients are measured in every third iteration of the
    second half, when windows are filled.
    """
    track, last = TRACKS[name], iterations // 4
    flags = (*PARITY, *SETTING.split(), *track.layout, "--seed", str(seed))
    if track.bounds is None and not track.fault_in:
        losses = ranks.run(
            train_curve,
            world_size=track.ranks,
            flags=(*flags, *track.flags),
            iterations=iterations,
        )[0].losses
        return {"loss": mean(losses[-last:])}
    found = ranks.run(
        measure,
        world_size=track.ranks,
        flags=flags,
        fp8_flags=track.flags,
        iterations=iterations,
        measured=tuple(range(iterations // 2 + 1, iterations + 1, 3)),
        defect=DEFECTS.get(track.defect),
    )[0]
    return {"loss": mean(found.losses[-last:])} | found.worst()


def outside(figures: Figures, limits: Bounds) -> list[str]:
    """Return the measures that do not hold their bound; NaN holds none."""
    holds = {
        key: figures[key] <= limits[key] if key == "underflow" else figures[key] >= limits[key]
        for key in MEASURES
    }
    return [key for key, good in holds.items() if not good]


def prediction_band(values: list[float]) -> float:
    """Half the width of the two-sided 95 % interval for one more seed: t s sqrt(1 + 1 / n)."""
    return spread(values) * math.sqrt(1 + 1 / len(values))


def mean_band(values: list[float]) -> float:
    """Half the width of the two-sided 95 % interval for the mean: t s / sqrt(n)."""
    return spread(values) / math.sqrt(len(values))


def spread(values: list[float]) -> float:
    """Return t s; NaN for one value, and for any that is not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return T_975[len(values) - 2] * stdev(values)


def verdict(name: str, results: Results) -> tuple[str, bool]:
    """Return what the table says of a track and whether that is as it must be.

    A fault is outside if every seed breaks one and the same bound of its recipe, and lies beyond
    the recipe's band over seeds there.
    """
    track, figures = TRACKS[name], list(results[name].values())
    if track.bounds is not None:
        broken = sorted({key for one in figures for key in outside(one, track.bounds)})
        return ("outside: " + ", ".join(broken) if broken else "inside"), not broken
    recipe = TRACKS[track.fault_in]
    assert recipe.bounds is not None
    shown = []
    for key in MEASURES:
        usual = [one[key] for one in results[track.fault_in].values()]
        width = prediction_band(usual) if len(usual) > 1 else 0.0
        edge = mean(usual) + (width if key == "underflow" else -width)
        for limits in ({**recipe.bounds, key: edge}, recipe.bounds):
            if not all(key in outside(one, limits) for one in figures):
                break
        else:
            shown.append(key)
    return ("outside: " + ", ".join(shown) if shown else "inside"), bool(shown)


def table(results: Results) -> tuple[list[str], bool]:
    """Return the lines of a Markdown table and whether all is as it must be."""
    lines = [
        "| run | seeds | SQNR, dB | cosine | underflow, % | verdict | loss | against BF16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    good = True
    for name, track in TRACKS.items():
        if name not in results:
            continue
        by_seed = results[name]
        cells = [name, str(len(by_seed))]
        losses = {seed: one["loss"] for seed, one in by_seed.items()}
        if name == track.bf16:
            width = prediction_band(list(losses.values()))
            cells += ["-"] * 4 + [f"{mean(losses.values()):.3f} ± {width:.3f}", "-"]
        else:
            for key, digits in zip(MEASURES, (1, 4, 2), strict=True):
                values = [one[key] for one in by_seed.values()]
                cell = f"{mean(values):.{digits}f} ± {prediction_band(values):.{digits}f}"
                if track.bounds is not None:
                    cell += f" ({'≤' if key == 'underflow' else '≥'} {track.bounds[key]:g})"
                cells.append(cell)
            said, as_it_must = verdict(name, results)
            good = good and as_it_must
            pairs = {seed: results[track.bf16][seed]["loss"] for seed in losses}
            apart = [losses[seed] - pairs[seed] for seed in losses]
            cells += [said, f"{mean(losses.values()):.3f}"]
            cells.append(f"{mean(apart):+.4f} ± {mean_band(apart):.4f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines, good


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="at most 10")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of each run")
    parser.add_argument(
        "--tracks",
        nargs="+",
        choices=(*GROUPS, *TRACKS),
        default=list(GROUPS),
        metavar="TRACK",
        help=f"groups ({', '.join(GROUPS)}) or tracks (default: all)",
    )
    parser.add_argument("--results", type=Path, help="JSON file that keeps figures over calls")
    parser.add_argument("--write", type=Path, help="document whose section is replaced")
    arguments = parser.parse_args(argv)
    wanted = {track for name in arguments.tracks for track in GROUPS.get(name, [name])}
    wanted |= {TRACKS[name].fault_in or name for name in wanted}
    wanted |= {TRACKS[name].bf16 for name in wanted}
    results: Results = {}
    if arguments.results is not None and arguments.results.is_file():
        results = json.loads(arguments.results.read_text())
    ranks = Ranks(size=4, timeout=600.0)
    try:
        for seed in arguments.seeds:
            for name in (name for name in TRACKS if name in wanted):
                if str(seed) in results.get(name, {}):
                    continue
                figures = run_track(ranks, name, seed, arguments.iterations)
                results.setdefault(name, {})[str(seed)] = figures
                print(f"seed {seed}, {name}: {figures}", flush=True)
                if arguments.results is not None:
                    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        ranks.close()
    lines, good = table(results)
    print("\n".join(lines))
    if arguments.write is not None:
        arguments.write.write_text(replaced(arguments.write.read_text(), lines))
    return 0 if good else 1


def replaced(document: str, lines: list[str]) -> str:
    """Return the document with the section anew: before the loss's if it is not there yet."""
    section = "\n".join([HEADING, "", INTRODUCTION, *lines, "", ""])
    if HEADING in document:
        before, rest = document.split(HEADING, 1)
        return before + section + rest[rest.index("\n## ") + 1 :]
    before, rest = document.split(NEXT_HEADING, 1)
    return before + section + NEXT_HEADING + rest


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
