"""Trains the quickstart's model in FP8 and without it on the same data, and compares losses.

    bash scripts/quickstart.sh                      (makes the corpus)
    python tests/tools/fp8_loss.py [--tracks recipes wires ...] [--data runs/quickstart/data]
                                   [--iterations 300] [--ranks 4] [--results losses.json]
                                   [pretrain_gpt.py's flags]

A track is one run; its control is the run that it is compared with. Tracks of `recipes` have `bf16`
for it, on one rank or with --ranks 4 at TP 2 x PP 2, the quickstart's layout. Tracks of `wires` run
at TP 2 x FSDP 2, so that weights and gradients travel too, and have `wires-none`. Without --tracks
`bf16` and `delayed-hybrid` run. A control that is missing is run too. A track takes about 4 minutes
on one core, or 8 with 4 ranks on two.

Training loss is the mean of the last 20 iterations. Exit code 1: a loss of a track is more than 1 %
away from its control's, or a linear of its plan is not FP8. The track `bf16-halved` is `bf16` with
micro-batches of 2, which only changes where gradients are rounded: its distance is what a
difference means. Where that is large, give a lower --lr. Runs without any scaling hold that bound
too; fp8_gradients.py tells them from others.

With --results the losses are kept in a file, and tracks that are in it are not run again: one file
for each set of flags.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
BOUND = 0.01
LAST = 20
LOSSES = ("training loss", "validation loss")
NOT_FP8 = "linears not FP8"
BF16, WIRES = "bf16", "wires-none"
ALONE = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
ALONE += ["--no-sequence-parallel"]


@dataclass(frozen=True)
class Track:
    """One run: the name of the run that it is compared with, and its flags."""

    control: str
    flags: list[str]

    @property
    def is_fp8(self) -> bool:
        """Whether every linear has to be FP8."""
        return "none" not in self.flags


RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
OF_RECIPES = {
    BF16: Track(BF16, ["--fp8-format", "none"]),
    "bf16-halved": Track(BF16, ["--fp8-format", "none", "--micro-batch-size", "2"]),
} | {
    f"{recipe}-{fmt}": Track(BF16, ["--fp8-recipe", recipe, "--fp8-format", fmt])
    for recipe in RECIPES
    for fmt in ("hybrid", "e4m3")
}
TP, GATHER, REDUCE = ["--fp8-tp-comm", "all"], ["--fp8-param-gather"], ["--fp8-grad-reduce"]
OF_WIRES = {
    WIRES: Track(WIRES, []),
    "wires-tp-comm-all": Track(WIRES, TP),
    "wires-param-gather": Track(WIRES, GATHER),
    "wires-grad-reduce": Track(WIRES, REDUCE),
    "wires-grad-reduce-feedback": Track(WIRES, [*REDUCE, "--fp8-grad-error-feedback"]),
    "wires-all": Track(WIRES, [*TP, *GATHER, *REDUCE]),
}
TRACKS = OF_RECIPES | OF_WIRES
GROUPS = {"recipes": list(OF_RECIPES), "wires": list(OF_WIRES)}


def train(
    run_dir: Path, data: Path, iterations: int, ranks: int, flags: list[str]
) -> dict[str, float]:
    """Train once; return the losses, and how many linears of the plan are not FP8."""
    from megafp8.train.metrics import read_metrics

    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["pretrain_gpt.py", "--config", "scripts/configs/tiny.yaml"]
    command += ["--data-path", str(data / "stdlib_text_document")]
    command += ["--tokenizer-model", str(data / "tokenizer"), "--run-dir", str(run_dir)]
    command += ["--train-iters", str(iterations), "--eval-interval", str(iterations), *flags]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if ranks > 1 else {})
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    entries = read_metrics(run_dir)
    tail = [float(entry["loss"]) for entry in entries[-LAST:]]
    plan = yaml.safe_load((run_dir / "manifest.yaml").read_text())["plan"]["linears"]
    found = (sum(tail) / len(tail), float(entries[-1]["valid_loss"]))
    return dict(zip(LOSSES, found, strict=True)) | {
        NOT_FP8: sum(linear["precision"] != "fp8" for linear in plan)
    }


def layout(name: str, ranks: int) -> tuple[int, list[str]]:
    """Return ranks and flags of a track's layout; the preset's own is TP 2 x PP 2."""
    if name in OF_WIRES:
        return 4, ["--pipeline-model-parallel-size", "1"]
    return ranks, ALONE if ranks == 1 else []


def table(results: dict[str, dict[str, float]]) -> tuple[list[str], bool]:
    """Return the lines of a Markdown table and whether every track holds the bound.

    Args:
        results: Track to losses, every track's control included.
    """
    good = True
    lines = [
        "| track | training loss | against control | validation loss | against control |",
        "|---|---|---|---|---|",
    ]
    for name, track in TRACKS.items():
        if name not in results:
            continue
        cells, found = [name], results[name]
        for key in LOSSES:
            difference = found[key] / results[track.control][key] - 1
            good = good and abs(difference) <= BOUND  # False for NaN
            cells += [f"{found[key]:.4f}", f"{difference:+.2%}" if name != track.control else "-"]
        good = good and not (track.is_fp8 and found[NOT_FP8])
        lines.append("| " + " | ".join(cells) + " |")
    return lines, good


def wanted_tracks(names: list[str], results: dict[str, dict[str, float]]) -> list[str]:
    """Return the tracks to run, controls first: those asked for, and controls that are missing."""
    wanted = {track for name in names for track in GROUPS.get(name, [name])}
    wanted |= {TRACKS[name].control for name in (*wanted, *results)}
    return [name for name in TRACKS if name in wanted and name not in results]


def main() -> int:
    """Run the tracks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data",
        type=Path,
        default=REPOSITORY / "runs/quickstart/data",
        help="folder of the corpus of scripts/quickstart.sh (default: runs/quickstart/data)",
    )
    parser.add_argument(
        "--iterations", type=int, default=300, help="of each track (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, choices=(1, 4), default=1, help="of `recipes` (default: %(default)s)"
    )
    parser.add_argument(
        "--tracks",
        nargs="+",
        choices=(*GROUPS, *TRACKS),
        default=[BF16, "delayed-hybrid"],
        metavar="TRACK",
        help=f"what to train: groups ({', '.join(GROUPS)}) or tracks ({', '.join(TRACKS)})",
    )
    parser.add_argument("--results", type=Path, help="JSON file that keeps losses over calls")
    args, flags = parser.parse_known_args()
    data = args.data.resolve()
    if not (data / "stdlib_text_document.idx").is_file():
        print(f"error: {args.data} holds no corpus; run scripts/quickstart.sh first")
        return 2
    results: dict[str, dict[str, float]] = {}
    if args.results is not None and args.results.is_file():
        results = json.loads(args.results.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in wanted_tracks(args.tracks, results):
            ranks, placed = layout(name, args.ranks)
            more = placed + TRACKS[name].flags + flags
            results[name] = train(Path(folder) / name, data, args.iterations, ranks, more)
            if args.results is not None:
                args.results.write_text(json.dumps(results, indent=1) + "\n")
    lines, good = table(results)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
