"""The check of a GPU machine, at tiny size on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafp8.launch import gpu_check
from megafp8.launch.gpu_check import Row, render
from tests.support.layouts import ROOT


def test_tiny_check_runs_anywhere(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here; scripts/gpu_check.sh is the test")
    out = tmp_path / "check"
    command = ["-m", "megafp8.launch.gpu_check", "--tiny", "--steps", "2", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
    )
    rows = [Row(**row) for row in json.loads(out.with_suffix(".json").read_text())]
    assert render(rows) == out.with_suffix(".md").read_text() and render(rows) in done.stdout
    found = {row.check: row for row in rows}
    assert found["device"].found == "cpu"
    assert found["TransformerEngine"].verdict == "skipped" and found["TransformerEngine"].found
    assert found["training step of one block, native fp8"].value
    assert not [row for row in rows if row.verdict == "FAIL"]
    assert sum(row.verdict == "ok" for row in rows) == 9  # three products of three linears


def test_a_failed_check_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "start", lambda *args: None)
    monkeypatch.setattr(gpu_check, "stop", lambda: None)
    for verdict, code in (("ok", 0), ("FAIL", 1), ("skipped", 0), ("", 0)):
        row = Row("something", "found", verdict)
        monkeypatch.setattr(gpu_check, "run_checks", lambda *args, row=row: [row])
        assert gpu_check.main(["--out", str(tmp_path / "x")]) == code
        assert f"| something | found | {verdict} |" in capsys.readouterr().out


def test_script_passes_its_arguments_on() -> None:
    text = (ROOT / "scripts/gpu_check.sh").read_text()
    assert '-m megafp8.launch.gpu_check "$@"' in text and "-m gpu" in text
    subprocess.run(["bash", "-n", str(ROOT / "scripts/gpu_check.sh")], check=True)
