"""Trains the quickstart model with each FP8 wire and with none, TP 2 x FSDP 2, compares losses.

    bash scripts/quickstart.sh                      (makes the corpus)
    python tests/tools/fp8_wires_loss.py [--data runs/quickstart/data] [--iterations 300]
                                         [--tracks none all ...] [--results losses.json]

Training loss is the mean of the last 20 iterations. Ends with exit code 1 if a track's training or
validation loss is more than 1 % above that of `none`. With --results the losses are kept in a file,
so that tracks can be run one by one. A track takes about 8 minutes on 2 busy cores.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from fp8_loss import BOUND, REPOSITORY, train

NONE = "none"
# Two data-parallel ranks instead of two stages, so that weights and gradients travel too.
LAYOUT = ["--pipeline-model-parallel-size", "1"]
TP, GATHER, REDUCE = ["--fp8-tp-comm", "all"], ["--fp8-param-gather"], ["--fp8-grad-reduce"]
TRACKS = {
    NONE: [],
    "tp-comm-all": TP,
    "param-gather": GATHER,
    "grad-reduce": REDUCE,
    "grad-reduce-feedback": [*REDUCE, "--fp8-grad-error-feedback"],
    "all": [*TP, *GATHER, *REDUCE],
}


def table(results: dict[str, dict[str, float]]) -> tuple[list[str], bool]:
    """Return the lines of a Markdown table and whether no track is worse than the bound."""
    plain, good = results[NONE], True
    lines = [
        "| FP8 wires | training loss | against none | validation loss | against none |",
        "|---|---|---|---|---|",
    ]
    for track, losses in results.items():
        cells = [track]
        for key in ("training loss", "validation loss"):
            difference = losses[key] / plain[key] - 1
            good = good and difference <= BOUND
            cells += [f"{losses[key]:.4f}", f"{difference:+.2%}" if track != NONE else "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines, good


def main() -> int:
    """Run the tracks and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY / "runs/quickstart/data")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--tracks", nargs="+", choices=tuple(TRACKS), default=list(TRACKS))
    parser.add_argument("--results", type=Path, help="JSON file that keeps losses over calls")
    args = parser.parse_args()
    if not (args.data / "stdlib_text_document.idx").is_file():
        print(f"error: {args.data} holds no corpus; run scripts/quickstart.sh first")
        return 2
    results: dict[str, dict[str, float]] = {}
    if args.results is not None and args.results.is_file():
        results = json.loads(args.results.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for name in args.tracks:
            run_dir, data = Path(folder) / name, args.data.resolve()
            results[name] = train(run_dir, data, args.iterations, 4, LAYOUT + TRACKS[name])
            if args.results is not None:
                args.results.write_text(json.dumps(results, indent=1) + "\n")
    if NONE not in results:
        print(json.dumps(results, indent=1))
        return 0
    lines, good = table({name: results[name] for name in TRACKS if name in results})
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
