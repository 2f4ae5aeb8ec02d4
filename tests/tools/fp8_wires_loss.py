"""Trains the quickstart model in FP8 and in BF16 on the same data and compares the losses.

    bash scripts/quickstart.sh                      (makes the corpus, and is the FP8 track itself)
    python tests/tools/fp8_loss.py [--data runs/quickstart/data] [--iterations 300]
    python tests/tools/fp8_loss.py --wires --keep runs/wires      (each FP8 wire against none)

Prints training loss (mean of the last 20 iterations) and validation loss of each track and their
relative difference to the last; exit code 1 if one exceeds 1 %. About 5 minutes a track on 2 cores.
With `--keep` finished tracks are kept and not trained again; `--only` trains one of them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BOUND = 0.01
LAST = 20


PLAIN = {"fp8": [], "bf16": ["--fp8-format", "none"]}
# Two data-parallel ranks instead of two stages, so that weights and gradients travel too.
LAYOUT = ["--pipeline-model-parallel-size", "1"]
TP, GATHER = ["--fp8-tp-comm", "all"], ["--fp8-param-gather"]
REDUCE, FEEDBACK = ["--fp8-grad-reduce"], ["--fp8-grad-error-feedback"]
WIRES = {
    "tp-comm-all": [*LAYOUT, *TP],
    "param-gather": [*LAYOUT, *GATHER],
    "grad-reduce": [*LAYOUT, *REDUCE],
    "grad-reduce-feedback": [*LAYOUT, *REDUCE, *FEEDBACK],
    "all": [*LAYOUT, *TP, *GATHER, *REDUCE],
    "none": LAYOUT,
}


def train(run_dir: Path, data: Path, iterations: int, flags: list[str]) -> dict[str, float]:
    """Train one track on 4 ranks, unless it is there, and return its losses."""
    from megafp8.train.metrics import read_metrics

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["4", "pretrain_gpt.py", "--config", "scripts/configs/tiny.yaml"]
    command += ["--data-path", str(data / "stdlib_text_document")]
    command += ["--tokenizer-model", str(data / "tokenizer"), "--run-dir", str(run_dir)]
    command += ["--train-iters", str(iterations), "--eval-interval", str(iterations), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if not (run_dir / "metrics.jsonl").is_file() or len(read_metrics(run_dir)) < iterations:
        subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    entries = read_metrics(run_dir)
    tail = [float(entry["loss"]) for entry in entries[-LAST:]]
    return {
        "training loss": sum(tail) / len(tail),
        "validation loss": float(entries[-1]["valid_loss"]),
    }


def main() -> int:
    """Run the tracks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY / "runs/quickstart/data")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--wires", action="store_true", help="compare FP8 wires, not FP8 and BF16")
    parser.add_argument("--keep", type=Path, help="folder for the tracks' run folders")
    parser.add_argument("--only", choices=[*PLAIN, *WIRES], help="train this track alone")
    args = parser.parse_args()
    if not (args.data / "stdlib_text_document.idx").is_file():
        print(f"error: {args.data} holds no corpus; run scripts/quickstart.sh first")
        return 2
    tracks = WIRES if args.wires else PLAIN
    if args.only:
        tracks = {args.only: tracks[args.only]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.keep or Path(temporary)).resolve()
        losses = {
            name: train(folder / name, args.data.resolve(), args.iterations, flags)
            for name, flags in tracks.items()
        }
    control = list(tracks)[-1]
    worst = 0.0
    for key, wanted in losses[control].items():
        for name in tracks:
            difference = losses[name][key] / wanted - 1
            worst = max(worst, abs(difference))
            print(f"{key}: {name} {losses[name][key]:.4f}, difference {difference:+.2%}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
