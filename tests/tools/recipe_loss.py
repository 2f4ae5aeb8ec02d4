"""Trains the quickstart model with every FP8 recipe and in BF16 on the same data, compares losses.

    bash scripts/quickstart.sh                      (makes the corpus)
    python tests/tools/recipe_loss.py [--data runs/quickstart/data] [--iterations 300]
                                      [--tracks bf16 mxfp8-e4m3 ...] [--results losses.json]
                                      [--ranks 4] [pretrain_gpt.py's flags]

Training loss is the mean of the last 20 iterations. Ends with exit code 1 if a track's training or
validation loss is more than 1 % away from BF16's, or if its plan holds a linear that is not FP8.
With --results the losses are kept in a file, and tracks that are in it are not run again.

The track `bf16-halved` is BF16 again with micro-batches of half the size, which only changes where
gradients are rounded: its distance from `bf16` is what a difference means. Give a low learning rate
where it is large. --ranks 1 is the default; 4 is the quickstart's TP 2 x PP 2.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
BOUND = 0.01
LAST = 20
BF16 = "bf16"
RECIPES = ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
TRACKS: dict[str, list[str]] = {
    BF16: ["--fp8-format", "none"],
    "bf16-halved": ["--fp8-format", "none", "--micro-batch-size", "2"],
} | {
    f"{recipe}-{fmt}": ["--fp8-recipe", recipe, "--fp8-format", fmt]
    for recipe in RECIPES
    for fmt in ("hybrid", "e4m3")
}
ALONE = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"]
ALONE += ["--no-sequence-parallel"]


def train(
    run_dir: Path, data: Path, iterations: int, ranks: int, flags: list[str]
) -> dict[str, float]:
    """Train one track and return its losses; `linears not FP8` counts those of the plan."""
    from megafp8.train.metrics import read_metrics

    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["pretrain_gpt.py", "--config", "scripts/configs/tiny.yaml"]
    command += ["--data-path", str(data / "stdlib_text_document")]
    command += ["--tokenizer-model", str(data / "tokenizer"), "--run-dir", str(run_dir)]
    command += ["--train-iters", str(iterations), "--eval-interval", str(iterations)]
    command += (ALONE if ranks == 1 else []) + flags
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if ranks > 1 else {})
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    entries = read_metrics(run_dir)
    tail = [float(entry["loss"]) for entry in entries[-LAST:]]
    plan = yaml.safe_load((run_dir / "manifest.yaml").read_text())["plan"]["linears"]
    return {
        "training loss": sum(tail) / len(tail),
        "validation loss": float(entries[-1]["valid_loss"]),
        "linears not FP8": sum(linear["precision"] != "fp8" for linear in plan),
    }


def table(results: dict[str, dict[str, float]]) -> tuple[list[str], bool]:
    """Return the lines of a Markdown table and whether every track holds the bound."""
    bf16, good = results[BF16], True
    lines = [
        "| recipe | format | training loss | against BF16 | validation loss | against BF16 |",
        "|---|---|---|---|---|---|",
    ]
    for track, losses in results.items():
        recipe, _, fmt = track.partition("-")
        cells = [recipe, fmt or "-"]
        for key in ("training loss", "validation loss"):
            difference = losses[key] / bf16[key] - 1
            good = good and abs(difference) <= BOUND
            cells += [f"{losses[key]:.4f}", f"{difference:+.2%}" if fmt else "-"]
        good = good and (recipe == BF16 or losses["linears not FP8"] == 0)
        lines.append("| " + " | ".join(cells) + " |")
    return lines, good


def main() -> int:
    """Run the tracks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY / "runs/quickstart/data")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--ranks", type=int, choices=(1, 4), default=1)
    parser.add_argument("--tracks", nargs="+", choices=tuple(TRACKS), default=list(TRACKS))
    parser.add_argument("--results", type=Path, help="JSON file that keeps losses over calls")
    args, flags = parser.parse_known_args()
    if not (args.data / "stdlib_text_document.idx").is_file():
        print(f"error: {args.data} holds no corpus; run scripts/quickstart.sh first")
        return 2
    results: dict[str, dict[str, float]] = {}
    if args.results is not None and args.results.is_file():
        results = json.loads(args.results.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in args.tracks:
            if name in results:
                continue
            run_dir, data = Path(folder) / name, args.data.resolve()
            results[name] = train(run_dir, data, args.iterations, args.ranks, TRACKS[name] + flags)
            if args.results is not None:
                args.results.write_text(json.dumps(results, indent=1) + "\n")
    ordered = {name: results[name] for name in TRACKS if name in results}
    if BF16 not in ordered:
        print(json.dumps(ordered, indent=1))
        return 0
    lines, good = table(ordered)
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
