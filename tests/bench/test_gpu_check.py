"""The check of a GPU machine, at tiny size on a CPU, and with few packages beside torch."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import check, speed
from bench.gpu.rows import Measurement, Row, plain, render_rows, render_speed
from bench.model import BF16, RECIPES
from megafp8.numerics.kernels import EAGER
from tests.model.small import one_rank, world  # noqa: F401
from tests.support.layouts import ROOT
from tests.support.oracles import needs_triton

# What a machine does not have beside torch, Triton, NumPy, pytest, pydantic, PyYAML and isal.
MISSING = (
    "rich", "safetensors", "sentencepiece", "tokenizers", "tensorboard", "matplotlib",
    "transformer_engine", "tyro", "wandb", "transformers", "torchao",
)  # fmt: skip
BLOCKER = """
from importlib.machinery import PathFinder

MISSING = {missing!r}
found = PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] in MISSING else found(name, path, target)


PathFinder.find_spec = classmethod(find_spec)
"""
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="there is a CUDA device here; scripts/gpu_check.sh is the test",
)


def bare(
    tmp_path: Path, *command: str, missing: tuple[str, ...] = MISSING, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command whose Python lacks the packages of `missing`."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(missing=missing))
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


@on_cpu
def test_tiny_check_needs_few_packages(tmp_path: Path) -> None:
    out = tmp_path / "check"
    command = ("-m", "bench.gpu.check", "--tiny", "--steps", "2", "--out", str(out))
    done = bare(tmp_path, sys.executable, *command)
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
    for recipe in RECIPES:  # y, dx and dw
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
        "from bench.gpu import check;"
        "from megafp8.numerics.kernels import choose_kernels;"
        "from megafp8.parallel import start, stop;"
        "check.LINEARS = ('linear_proj',);"  # the interpreter is slow
        "rows = check.value_rows(check.TINY, start(0, 1, 0), choose_kernels('auto', 'cpu'), 1);"
        "found = [row for row in rows if 'kernels against' in row.check];"
        "print(len(found), {(row.found, row.verdict) for row in found}); stop()"
    )
    done = bare(tmp_path, sys.executable, "-c", script, TRITON_INTERPRET="1")
    wanted = "6 {('all products and scales are bit-equal', 'ok')}"
    assert done.stdout.strip() == wanted, done.stderr[-3000:]


def test_gpu_tests_of_numerics_are_found_without_the_other_packages(tmp_path: Path) -> None:
    command = ("-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests/numerics")
    done = bare(tmp_path, sys.executable, *command)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "test_gpu_kernels.py" in done.stdout and "test_numerics_gemm.py" in done.stdout


def test_a_failed_check_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "start", lambda *args: None)
    monkeypatch.setattr(check, "stop", lambda: None)
    for verdict, code in (("ok", 0), ("FAIL", 1), ("skipped", 0), ("", 0)):
        row = Row("something", "found", verdict)
        monkeypatch.setattr(check, "run_checks", lambda *args, row=row: ([row], []))
        assert check.main(["--out", str(tmp_path / "x")]) == code
        assert f"| something | found | {verdict} |" in capsys.readouterr().out


def test_flops_are_those_of_the_products() -> None:
    """6 for each weight and token, and two attention products of half the square each."""
    hidden, ffn, tokens, seq = 4096, 14336, 8192, 4096
    weights = hidden * (hidden + 2 * 1024) + hidden * hidden + 3 * hidden * ffn
    attention = 3 * 2 * 2 * tokens * seq * hidden / 2
    assert speed.LLAMA_8B.block_flops == 6 * tokens * weights + attention


def test_script_passes_its_arguments_on() -> None:
    text = (ROOT / "scripts/gpu_check.sh").read_text()
    assert '-m bench.gpu.check "$@"' in text and "-m gpu" in text
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


@pytest.mark.parametrize(
    ("missing", "said"), [(("pydantic", "yaml"), "pydantic, PyYAML"), (("yaml",), "PyYAML")]
)
def test_script_says_in_a_line_what_python_lacks(
    tmp_path: Path, missing: tuple[str, ...], said: str
) -> None:
    command = ("bash", str(ROOT / "scripts/gpu_check.sh"), "--tiny")
    done = bare(tmp_path, *command, missing=missing, MEGAFP8_PYTHON=sys.executable)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"gpu_check.sh: {sys.executable} has no {said}; ")


@pytest.mark.usefixtures("one_rank")
def test_what_raises_is_a_failed_row_and_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> list[Row]:
        raise ValueError("no kernel | here")

    monkeypatch.setattr(speed.BenchModel, "linear", broken)
    rows = check.value_rows(check.TINY, world(), EAGER, 1)
    assert [(row.check, row.verdict) for row in rows] == [("bf16: products", "FAIL")]
    failures: list[Row] = []
    found = speed.measure_speed(world(), True, EAGER, failures)
    failed = {row.check: row.found for row in failures if row.verdict == "FAIL"}
    linears = ("linear_qkv 128 x 256", "linear_proj 128 x 128")
    linears += ("linear_fc1 128 x 512", "linear_fc2 256 x 128")
    precisions = ("bf16", "fp8, eager")
    assert list(failed) == [f"speed: tiny {name}, {p}" for p in precisions for name in linears]
    assert set(failed.values()) == {"ValueError: no kernel / here"}
    names = {row.name for row in found}
    assert "tiny block" in names and not any("linear_fc1" in name for name in names)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("one_rank")
def test_overhead_is_what_the_products_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured where the device multiplies FP8; pretended here, with a clock that adds up."""
    clock = speed.Clock(torch.device("cpu"), 1)
    # The products of the four linears; then in both precisions the linears and the block.
    taken = iter([2.0] * 4 + [8.0] * 5 + [4.0] * 5)
    monkeypatch.setattr(speed.Clock, "__call__", lambda self, call: (next(taken), None))
    monkeypatch.setattr(speed, "fp8_hardware", lambda device: (True, ""))
    works = speed.layer_works(clock, "tiny", speed.TINY)
    ceilings, failures = speed.Ceilings(1e9, 1e9, 1e9), []
    variants = speed.variants_of(EAGER)
    rows = speed.compared(clock, ceilings, world(), failures, speed.TINY, variants, works)
    assert failures == []
    assert [row.overhead for row in rows] == [None, 0.5] * 4 + [None, None]
    assert [row.speedup for row in rows] == [1.0, 2.0] * 5
    assert "| 50% |" in render_speed(rows).splitlines()[3]


@pytest.mark.usefixtures("one_rank")
def test_recipes_are_measured_where_the_device_multiplies_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, sizes = torch.device("cpu"), speed.TINY
    emulated = speed.recipe_variants(sizes, device, EAGER)
    assert emulated == {"bf16": BF16}, "a CPU emulates all of them"
    monkeypatch.setattr(speed, "recipe_hardware", lambda recipe, device: (True, ""))
    variants = speed.recipe_variants(sizes, device, EAGER)
    clock, ceilings, failures = speed.Clock(device, 1), speed.Ceilings(1e9, 1e9, 1e9), []
    works = speed.recipe_works("tiny", sizes)
    rows = speed.compared(clock, ceilings, world(), failures, sizes, variants, works)
    assert failures == []
    assert [row.precision for row in rows] == ["bf16", *(f"fp8 {r}, eager" for r in RECIPES)]
    assert all(row.milliseconds > 0 for row in rows)


@pytest.mark.usefixtures("one_rank")
def test_every_recipe_has_all_its_linears_in_fp8() -> None:
    """At these sizes: a plan that left one in BF16 would be timed as FP8."""
    for flags in RECIPES.values():
        bench = check.BenchModel(speed.TINY, flags, world())
        assert bench.registry is not None and len(bench.registry.keys) == 12


def test_three_products_run_in_both_formats() -> None:
    taken = speed.three_products(speed.Clock(torch.device("cpu"), 1), 32, 48, 16)
    assert taken > 0


def test_numbers_that_json_has_not_are_null() -> None:
    found = [plain(Row("equal", "inf dB", "ok", value)) for value in (math.inf, math.nan)]
    assert [row["value"] for row in found] == [None, None]
    assert plain(Measurement("copy", "", 1.0, tflops=math.nan))["tflops"] is None
