"""The launch scripts where something is missing: one line and exit code 2, not bash's own words."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
LLAMA = "scripts/pretrain_llama3_8b.sh"
SLURM = "scripts/slurm/pretrain.sbatch"
GIVEN = {"DATA_PATH": "corpus", "TOKENIZER_MODEL": "tokenizer", "SLURM_SUBMIT_DIR": str(ROOT)}
GIVEN |= {"SLURM_JOB_NAME": "job"}


def run(script: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    return subprocess.run(
        ["bash", str(ROOT / script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize(
    ("script", "variable"), [(LLAMA, "PYTHON"), (SLURM, "PYTHON"), ("scripts/gpu_check.sh", "")]
)
@pytest.mark.parametrize("kind", ["missing", "without torch", "broken"])
def test_a_python_that_does_not_do(tmp_path: Path, script: str, variable: str, kind: str) -> None:
    python = tmp_path / "py"
    if kind != "missing":
        body = {"without torch": "exit 1", "broken": "echo Segfault >&2; kill -9 $$"}[kind]
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
    name = variable or "MEGAFP8_PYTHON"
    ended = run(script, {**GIVEN, name: str(python)})
    assert ended.returncode == 2
    reason = f"found no '{python}'" if kind == "missing" else f"{python} has no torch"
    assert ended.stdout == "" and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"{Path(script).name}: {name}: {reason}")
    assert f"set {name} to an interpreter with torch" in ended.stderr


@pytest.mark.parametrize("script", [LLAMA, SLURM])
@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"DATA_PATH": ""}, "DATA_PATH is not set; set it to the prefix of a .bin/.idx pair"),
        ({"TOKENIZER_MODEL": ""}, "TOKENIZER_MODEL is not set; set it to the tokenizer"),
        ({"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE: found '0', allowed a positive integer"),
        ({"GPUS_PER_NODE": "a[$(touch x)]"}, "GPUS_PER_NODE: found 'a[$(touch x)]', allowed"),
    ],
)
def test_variables_that_do_not_do(script: str, variables: dict[str, str], line: str) -> None:
    ended = run(script, GIVEN | variables)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith(f"{Path(script).name}: {line}")


@pytest.mark.parametrize("check", ["need_variable X what", "need_positive X", "need_torch X"])
def test_a_check_of_a_variable_that_is_not_set(check: str) -> None:
    """Not in bash's own words, which `set -u` would end with."""
    words = ["bash", "-uc", f"source {ROOT}/scripts/checks.sh; {check}"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("bash: X") and "unbound" not in ended.stderr


@pytest.mark.parametrize("folder", ["", "/"])
def test_the_slurm_script_says_where_it_is_to_be_submitted(folder: str) -> None:
    ended = run(SLURM, GIVEN | {"SLURM_SUBMIT_DIR": folder})
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "start this with sbatch, in the project's folder; found /" in ended.stderr


def test_the_quickstart_checks_what_it_is_given_before_it_installs(tmp_path: Path) -> None:
    ended = run("scripts/quickstart.sh", {"TRAIN_ITERS": "many"})
    assert ended.returncode == 2
    line = "quickstart.sh: TRAIN_ITERS: found 'many', allowed a positive integer\n"
    assert ended.stderr == line
    (tmp_path / "file").write_text("")
    ended = run("scripts/quickstart.sh", {"RUN_DIR": str(tmp_path / "file" / "run")})
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("quickstart.sh: RUN_DIR: ")
