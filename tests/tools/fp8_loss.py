"""Trains the quickstart model in FP8 and in BF16 on the same data and compares the losses.

    bash scripts/quickstart.sh                      (makes the corpus, and is the FP8 track itself)
    python tests/tools/fp8_loss.py [--data runs/quickstart/data] [--iterations 300]

Prints training loss (mean of the last 20 iterations) and validation loss of both tracks and their
relative difference; exit code 1 if a difference exceeds 1 %. About 10 minutes on 2 cores.
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


def train(run_dir: Path, data: Path, iterations: int, flags: list[str]) -> dict[str, float]:
    """Train one track at the quickstart's layout and return its losses."""
    from megafp8.train.metrics import read_metrics

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["4", "pretrain_gpt.py", "--config", "scripts/configs/tiny.yaml"]
    command += ["--data-path", str(data / "stdlib_text_document")]
    command += ["--tokenizer-model", str(data / "tokenizer"), "--run-dir", str(run_dir)]
    command += ["--train-iters", str(iterations), "--eval-interval", str(iterations), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    entries = read_metrics(run_dir)
    tail = [float(entry["loss"]) for entry in entries[-LAST:]]
    return {
        "training loss": sum(tail) / len(tail),
        "validation loss": float(entries[-1]["valid_loss"]),
    }


def main() -> int:
    """Run both tracks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY / "runs/quickstart/data")
    parser.add_argument("--iterations", type=int, default=300)
    args = parser.parse_args()
    if not (args.data / "stdlib_text_document.idx").is_file():
        print(f"error: {args.data} holds no corpus; run scripts/quickstart.sh first")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        tracks = {
            name: train(Path(folder) / name, args.data.resolve(), args.iterations, flags)
            for name, flags in (("fp8", []), ("bf16", ["--fp8-format", "none"]))
        }
    worst = 0.0
    for key, bf16 in tracks["bf16"].items():
        fp8 = tracks["fp8"][key]
        difference = fp8 / bf16 - 1
        worst = max(worst, abs(difference))
        print(f"{key}: FP8 {fp8:.4f}, BF16 {bf16:.4f}, difference {difference:+.2%}")
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
