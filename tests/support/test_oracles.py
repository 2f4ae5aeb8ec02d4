"""What is skipped is said at the end; where CI is set, a missing reference is a failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest
from tests.support.oracles import need

@pytest.mark.parametrize("case", [1, 2])
def test_compared_with_a_reference(case):
    need("a_reference")

@pytest.mark.gpu
def test_on_a_gpu():
    need("a_reference_for_gpus")

@pytest.mark.skip("not today")
def test_another():
    raise AssertionError
"""


@pytest.mark.parametrize("ci", [False, True], ids=["at hand", "in CI"])
def test_a_missing_reference(tmp_path: Path, ci: bool) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | (
        {"CI": "1"} if ci else {}
    )
    options = ("-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    reason = "a_reference is not installed; scripts/test.sh installs it"
    gpu = "   1 x needs a CUDA device; torch.cuda.is_available() is False"
    lines = done.stdout.splitlines()
    assert gpu in lines and "   1 x not today" in lines, done.stdout
    if ci:
        assert done.returncode == 1 and "2 failed, 2 skipped" in lines[-1], done.stdout
        assert f"{reason} (CI is set)" in lines
    else:
        assert done.returncode == 0 and "4 skipped" in lines[-1], done.stdout
        assert f"   2 x {reason}" in lines
