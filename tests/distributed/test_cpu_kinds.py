"""A run on a CPU without BF16 units is the run on one with them, but for roundings."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.launches import TINY, launched


def test_a_run_without_bf16_units(tmp_path: Path) -> None:
    curves, patch = [], ("tests.support.faults:without_bf16_units", {})
    flags = ("--train-iters", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel")
    for name, change in (("units", None), ("none", patch)):
        folder = tmp_path / name
        with launched(2, [*TINY, *flags, "--run-dir", str(folder)], folder / "logs", change) as run:
            assert run.wait() == [0, 0], run.text()
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        curves.append([json.loads(line)["loss"] for line in lines])
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)
    assert "BF16 is multiplied in FP32: " in run.output(0)
    recorded = yaml.safe_load((folder / "manifest.yaml").read_text())["backend"]["bf16_products"]
    assert recorded["chosen"] == "fp32"
