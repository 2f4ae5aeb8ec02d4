"""What `scripts/quickstart.sh` prints at its end: figures of the run, and its loss curve's file.

python -m megafp8.report.quickstart RUN_DIR CORPUS_PREFIX COMMAND
"""

import sys
from pathlib import Path

from megafp8.data.corpus_stats import unigram_entropy
from megafp8.report.curves import plot_loss_curve
from megafp8.report.summary import summarize_run
from megafp8.train.metrics import read_metrics


def describe_quickstart(run_dir: Path, corpus: str, command: str) -> str:
    """Draw the loss curve into the run folder and return the closing lines.

    The validation loss stands beside the corpus' unigram entropy: what a model reaches that has
    learnt token frequencies and nothing else.

    Args:
        run_dir: The run folder.
        corpus: Prefix of its corpus.
        command: What the user typed, shown once more for a run of twice the length.

    Raises:
        DataError: no metrics in the run folder, or no corpus under that prefix.
    """
    entropy = unigram_entropy(corpus)
    curve = run_dir / "loss_curve.png"
    plot_loss_curve(run_dir, curve, entropy)
    lines = [summarize_run(run_dir), f"unigram entropy:    {entropy:.4f} nats per token"]
    entries = read_metrics(run_dir)
    losses = [entry["valid_loss"] for entry in entries if entry.get("valid_loss") is not None]
    if losses:
        gain = entropy - losses[-1]
        lines.append(
            f"validation loss:    {losses[-1]:.4f}, {gain:.2f} nats below it"
            if gain > 0
            else f"validation loss:    {losses[-1]:.4f}, {-gain:.2f} nats above it"
        )
    lines.append(f"loss curve:         {curve}")
    lines.append(f"next: TRAIN_ITERS={2 * entries[-1]['iteration']} {command}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe_quickstart(Path(sys.argv[1]), *sys.argv[2:]))
