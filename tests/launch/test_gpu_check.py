"""The check of a GPU machine, at tiny size on a CPU, and with torch and pytest alone."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafp8.launch import gpu_check, gpu_model, gpu_speed
from megafp8.launch.gpu_rows import Row, render_rows
from megafp8.launch.gpu_speed import LLAMA_8B, Measurement, render_speed
from megafp8.numerics.kernels import EAGER
from megafp8.parallel.mesh import build_mesh
from tests.model.small import one_rank, world  # noqa: F401
from tests.support.layouts import ROOT
from tests.support.oracles import needs_triton

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
    for recipe in gpu_model.recipes():  # y, dx and dw
        assert sum(row.verdict == "ok" for row in rows if row.check.startswith(f"{recipe}: ")) == 3
        assert found[f"{recipe}: GEMMs"].verdict == "skipped"
    names = {row.name for row in speed}
    assert {"copy", "product", "tiny block", "tiny linear_fc1 128 x 512"} <= names
    steps = [row for row in speed if row.name == "tiny training step, 2 layers"]
    assert [row.precision for row in steps] == ["bf16", "fp8, eager"]
    assert all(row.milliseconds > 0 and row.speedup for row in steps)


@needs_triton
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
        "found = [row for row in rows if 'kernels against' in row.check];"
        "print(len(found), {(row.found, row.verdict) for row in found}); stop()"
    )
    done = bare(tmp_path, "-c", script, TRITON_INTERPRET="1")
    wanted = "6 {('all products and scales are bit-equal', 'ok')}"
    assert done.stdout.strip() == wanted, done.stderr[-3000:]


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


def test_script_asked_for_help_runs_no_test() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh"), "--help"],
        env={**os.environ, "MEGAFP8_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--tiny" in done.stdout and "passed" not in done.stdout


@pytest.mark.usefixtures("one_rank")
def test_what_raises_is_a_failed_row_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> list[Measurement]:
        raise ValueError("no kernel | here")

    monkeypatch.setattr(gpu_speed, "linears", broken)
    monkeypatch.setattr(gpu_check, "backend_rows", broken)
    rows, speed = gpu_check.run_checks(world(), tiny=True, steps=1)
    failed = {row.check: row.found for row in rows if row.verdict == "FAIL"}
    assert set(failed) == {"backends", "speed: tiny linears"}
    assert set(failed.values()) == {"ValueError: no kernel / here"}
    names = {row.name for row in speed}
    assert "tiny block" in names and not any("linear_fc1" in name for name in names)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("one_rank")
def test_overhead_is_what_the_products_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured where the device multiplies FP8; pretended here, with a clock that adds up."""
    clock = gpu_speed.Clock(torch.device("cpu"), 1)
    taken = iter([2.0, 8.0, 4.0] * 4)
    monkeypatch.setattr(gpu_speed.Clock, "__call__", lambda self, call: (next(taken), None))
    monkeypatch.setattr(gpu_speed, "fp8_hardware", lambda device: (True, ""))
    ceilings = gpu_speed.Ceilings(1e9, 1e9, 1e9)
    mesh = build_mesh(gpu_model.single_layout(), world())
    variants = gpu_speed._variants([EAGER])
    rows = gpu_speed.linears(clock, ceilings, "tiny", gpu_speed.TINY, mesh, variants)
    assert [row.overhead for row in rows] == [None, 0.5] * 4
    assert [row.speedup for row in rows] == [1.0, 2.0] * 4
    assert "| 50% |" in render_speed(rows).splitlines()[3]


@pytest.mark.usefixtures("one_rank")
def test_recipes_are_measured_where_the_device_multiplies_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = gpu_speed.Clock(torch.device("cpu"), 1)
    mesh = build_mesh(gpu_model.single_layout(), world())
    arguments = (clock, gpu_speed.Ceilings(1e9, 1e9, 1e9), "tiny", gpu_speed.TINY, mesh, EAGER)
    assert gpu_speed.other_recipes(*arguments) == [], "a CPU emulates all of them"
    monkeypatch.setattr(gpu_speed, "recipe_hardware", lambda recipe, device: (True, ""))
    rows = gpu_speed.other_recipes(*arguments)
    wanted = ["bf16", *(f"fp8 {name}, eager" for name in gpu_model.recipes())]
    assert [row.precision for row in rows] == wanted
    assert all(row.milliseconds > 0 for row in rows)


def test_three_products_run_in_both_formats() -> None:
    taken = gpu_speed.three_products(gpu_speed.Clock(torch.device("cpu"), 1), 32, 48, 16)
    assert taken > 0


def test_numbers_that_json_has_not_are_null() -> None:
    found = [gpu_check.plain(Row("equal", "inf dB", "ok", value)) for value in (math.inf, math.nan)]
    assert [row["value"] for row in found] == [None, None]
    assert gpu_check.plain(Measurement("copy", "", 1.0, tflops=math.nan))["tflops"] is None
