"""The check of a GPU machine, at tiny size on a CPU, and with torch and pytest alone."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafp8.launch import gpu_check
from megafp8.launch.gpu_rows import Row, render_rows
from megafp8.launch.gpu_speed import LLAMA_8B, Measurement, render_speed
from tests.support.layouts import ROOT

# What a machine with torch, Triton, NumPy and pytest does not have.
MISSING = (
    "pydantic", "yaml", "rich", "sentencepiece", "tokenizers", "tensorboard", "matplotlib",
    "transformer_engine", "tyro", "wandb", "transformers", "torchao",
)  # fmt: skip
BLOCKER = f"""
from importlib.machinery import PathFinder

found = PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] in {MISSING!r} else found(name, path, target)


PathFinder.find_spec = classmethod(find_spec)
"""
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="there is a CUDA device here; scripts/gpu_check.sh is the test",
)


def bare(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the packages of `MISSING`."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True
    )


@on_cpu
def test_tiny_check_needs_torch_alone(tmp_path: Path) -> None:
    out = tmp_path / "check"
    command = ("-m", "megafp8.launch.gpu_check", "--tiny", "--steps", "2", "--out", str(out))
    done = bare(tmp_path, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads(out.with_suffix(".json").read_text())
    rows = [Row(**row) for row in content["checks"]]
    speed = [Measurement(**row) for row in content["speed"]]
    table = render_rows(rows) + "\n" + render_speed(speed)
    assert table == out.with_suffix(".md").read_text() and table in done.stdout
    found = {row.check: row for row in rows}
    assert found["device"].found == "cpu"
    assert found["TransformerEngine"].verdict == "skipped" and found["TransformerEngine"].found
    assert not [row for row in rows if row.verdict == "FAIL"]
    assert sum(row.verdict == "ok" for row in rows) == 3  # y, dx and dw
    names = {row.name for row in speed}
    assert {"copy", "product", "tiny block", "tiny linear_fc1 64 x 256"} <= names
    steps = [row for row in speed if row.name == "tiny training step, 2 layers"]
    assert [row.precision for row in steps] == ["bf16", "fp8, eager"]
    assert all(row.milliseconds > 0 and row.speedup for row in steps)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@on_cpu
def test_kernels_are_checked_and_measured_where_they_run(tmp_path: Path) -> None:
    script = (
        "from megafp8.launch.gpu_check import TINY, value_rows;"
        "from megafp8.launch.gpu_model import single_layout;"
        "from megafp8.numerics.kernels import choose_kernels;"
        "from megafp8.parallel.mesh import build_mesh;"
        "from megafp8.parallel.startup import start, stop;"
        "world = start(0, 1, 0);"
        "kernels = choose_kernels('auto', 'cpu');"
        "rows = value_rows(TINY, build_mesh(single_layout(), world), kernels);"
        "print(rows[-1].found, rows[-1].verdict); stop()"
    )
    done = bare(tmp_path, "-c", script, TRITON_INTERPRET="1")
    assert done.stdout.strip() == "all products and scales are bit-equal ok", done.stderr[-3000:]


def test_gpu_tests_of_numerics_are_found_without_the_other_packages(tmp_path: Path) -> None:
    command = ("-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests/numerics")
    done = bare(tmp_path, *command)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "test_gpu_kernels.py" in done.stdout and "test_numerics_gemm.py" in done.stdout


def test_a_failed_check_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "start", lambda *args: None)
    monkeypatch.setattr(gpu_check, "stop", lambda: None)
    for verdict, code in (("ok", 0), ("FAIL", 1), ("skipped", 0), ("", 0)):
        row = Row("something", "found", verdict)
        monkeypatch.setattr(gpu_check, "run_checks", lambda *args, row=row: ([row], []))
        assert gpu_check.main(["--out", str(tmp_path / "x")]) == code
        assert f"| something | found | {verdict} |" in capsys.readouterr().out


def test_flops_are_those_of_the_products() -> None:
    """6 for each weight and token, and two attention products of half the square each."""
    hidden, ffn, tokens, seq = 4096, 14336, 8192, 4096
    weights = hidden * (hidden + 2 * 1024) + hidden * hidden + 3 * hidden * ffn
    attention = 3 * 2 * 2 * tokens * seq * hidden / 2
    assert LLAMA_8B.block_flops == 6 * tokens * weights + attention


def test_script_passes_its_arguments_on() -> None:
    text = (ROOT / "scripts/gpu_check.sh").read_text()
    assert '-m megafp8.launch.gpu_check "$@"' in text and "-m gpu" in text
    subprocess.run(["bash", "-n", str(ROOT / "scripts/gpu_check.sh")], check=True)
