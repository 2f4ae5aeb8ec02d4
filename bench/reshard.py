"""Offline change of layout of a checkpoint of about 1 GB: speed against a raw copy, and memory.

    python bench/reshard.py [--megabytes 1000] [--folder DIR]

The copy is of the same files in the same order, read and written in blocks of 4 MB and forced to
storage. Bars: at least 0.4 of the copy's speed; a peak below 512 MB above the interpreter's with
all imports.
"""

import argparse
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from megafp8.checkpoint.holdings import plan_holdings  # noqa: E402
from megafp8.checkpoint.offline import write_streaming  # noqa: E402
from megafp8.checkpoint.record import CheckpointRecord, TensorEntry  # noqa: E402
from megafp8.checkpoint.reshard import (  # noqa: E402
    TargetLayout,
    layout_fields,
    reshard_checkpoint,
    target_run,
)
from megafp8.config import ModelShape, RunConfig  # noqa: E402

TOOL = Path(__file__).resolve().parents[1] / "tools" / "reshard_checkpoint.py"
FLAGS = (
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "fsdp-size",
    "replicate-size",
)
VOCABULARY = 32000
HIDDEN = 768
# Parameters of a block: qkv 3h^2 with one group per head, proj h^2, MLP 3 * 4h^2 with a gate.
PER_LAYER = 4 * HIDDEN**2 + 3 * HIDDEN * 2048 + 2 * HIDDEN
_PEAK = (
    "import resource, runpy, sys; sys.argv = sys.argv[1:]\n"
    "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    "except SystemExit as done: code = done.code\n"
    "print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
)
_IMPORTS = (
    "import resource, megafp8.checkpoint.reshard;"
    "print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)


def make_source(root: Path, megabytes: int) -> Path:
    """Write a checkpoint of random weights and moments, saved as by TP 2 x PP 2."""
    wanted = megabytes * 1e6 / 12 - 2 * VOCABULARY * HIDDEN
    layers = max(4, round(wanted / PER_LAYER / 4) * 4)
    config = RunConfig.from_dict(
        {
            "model": {
                "num_layers": layers,
                "hidden_size": HIDDEN,
                "num_attention_heads": 12,
                "ffn_hidden_size": 2048,
                "swiglu": True,
                "disable_bias_linear": True,
                "normalization": "RMSNorm",
                "position_embedding_type": "rope",
                "untie_embeddings_and_output_weights": True,
                "seq_length": 1024,
                "max_position_embeddings": 1024,
            },
            "precision": {"bf16": True, "fp8_format": "hybrid"},
            "optimizer": {"lr": 1e-3},
            "training": {"micro_batch_size": 1, "train_iters": 10},
        }
    )
    shape = ModelShape.from_config(config, VOCABULARY)
    entries = {}
    for spec in shape.parameters():
        entries[spec.name] = TensorEntry(spec.shape, "float32")
        for key in ("exp_avg", "exp_avg_sq"):
            entries[f"optimizer.{spec.name}.{key}"] = TensorEntry(spec.shape, "float32")
        entries[f"optimizer.{spec.name}.step"] = TensorEntry((), "float32")
        if spec.kind == "linear":
            for role in ("input", "weight", "grad_output"):
                stem = f"fp8.{spec.name.removesuffix('.weight')}.{role}"
                entries[f"{stem}.scale"] = TensorEntry((), "float32")
                entries[f"{stem}.amax_history"] = TensorEntry((1024,), "float32")
    record = CheckpointRecord(
        iteration=1,
        config=config.model_dump(mode="json"),
        data_position={"consumed_samples": 8},
        state={"vocab_size": VOCABULARY},
        tensors=entries,
    )
    config, layout, _ = target_run(record, TargetLayout(2, 2, 1), root)
    record = dataclasses.replace(
        record, config=config.model_dump(mode="json"), layout=layout_fields(layout)
    )
    holdings = plan_holdings(entries, shape, layout)
    return write_streaming(root, record, holdings, lambda n: torch.rand(entries[n].shape) + 0.5)[0]


def raw_copy(source: Path, target: Path) -> float:
    """Copy the files of a folder; returns seconds."""
    start = time.perf_counter()
    target.mkdir()
    for path in sorted(source.iterdir()):
        with path.open("rb") as reading, (target / path.name).open("xb") as writing:
            shutil.copyfileobj(reading, writing, 4 * 2**20)
            writing.flush()
            os.fsync(writing.fileno())
    return time.perf_counter() - start


def peak_of(command: list[str]) -> tuple[float, str]:
    """Run Python in a process of its own; returns its peak memory in MB and its output."""
    environment = os.environ | {"PYTHONPATH": str(TOOL.parents[1])}
    done = subprocess.run(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    output, _, peak = done.stdout.rpartition("PEAK")
    return int(peak) / 1024, output


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--megabytes", type=int, default=1000, help="size of the checkpoint (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="on the file system to measure")
    parser.add_argument(
        "--rounds", type=int, default=3, help="repeats behind each median (default: %(default)s)"
    )
    args = parser.parse_args()
    bare, _ = peak_of(["-c", _IMPORTS])
    targets = {"1 rank": (1, 1, 1, 1), "tp4": (4, 1, 1, 1), "fsdp2 x replicate 2": (1, 1, 2, 2)}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        source = make_source(folder / "source", args.megabytes)
        size = sum(path.stat().st_size for path in source.iterdir()) / 1e6
        print(f"checkpoint of {size:.0f} MB saved at tp2 x pp2")
        for target, sizes in targets.items():
            copies, reshards = [], []
            for _ in range(args.rounds):
                copies.append(raw_copy(source, folder / "copy"))
                shutil.rmtree(folder / "copy")
                start = time.perf_counter()
                reshard_checkpoint(source, folder / "new", TargetLayout(*sizes))
                reshards.append(time.perf_counter() - start)
                shutil.rmtree(folder / "new")
            flags = ["--load", str(source), "--save", str(folder / "new")]
            for flag, number in zip(FLAGS, sizes, strict=True):
                flags += [f"--{flag}", str(number)]
            peak, _ = peak_of(["-c", _PEAK, str(TOOL), *flags])
            shutil.rmtree(folder / "new")
            copy, reshard = statistics.median(copies), statistics.median(reshards)
            print(
                f"{target:<20} copy {size / copy:6.0f} MB/s  reshard {size / reshard:6.0f} MB/s  "
                f"ratio {copy / reshard:.2f}  peak memory {peak - bare:+.0f} MB"
            )


if __name__ == "__main__":
    main()
