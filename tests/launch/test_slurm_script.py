"""`pretrain.sbatch` with stand-ins for Slurm's commands and for torchrun."""

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "slurm" / "pretrain.sbatch"

STANDS_IN = {
    "scontrol": 'if [ "$1" = show ]; then echo node1; else echo "$@" >> "$LOG"; fi',
    # Slurm signals every process of the step; here the step is one process.
    "scancel": 'echo "scancel $*" >> "$LOG"; kill -USR1 "$(cat "$PID")"',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    # Runs until it is asked to stop, then saves if it may, and ends as torchrun does.
    "python": """
[ "$1" != -c ] || exit 0  # whether it has torch
echo $$ > "$PID.tmp"; echo "$@" > "$ARGS"
trap '[ -z "$SAVES" ] || echo iter_0000007 > "$RUN_DIR/checkpoints/latest"; exit 1' USR1
eval "$SLOW"
mv "$PID.tmp" "$PID"
[ -z "$ENDS" ] || exit "$ENDS"
while true; do sleep 0.02; done
""",
}


def start(tmp_path: Path, **more: str) -> subprocess.Popen[str]:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in STANDS_IN.items():
        path = programs / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    environment = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        **{"PYTHON": str(programs / "python"), "RUN_DIR": str(tmp_path / "run")},
        **{"DATA_PATH": "corpus", "TOKENIZER_MODEL": "tokenizer"},
        **{"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "4242"},
        **{"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1"},
        **{"LOG": str(tmp_path / "log"), "PID": str(tmp_path / "pid")},
        **{"ARGS": str(tmp_path / "args"), "SAVES": "", "ENDS": "", "SLOW": "", **more},
    }
    return subprocess.Popen(
        ["bash", str(SCRIPT), "--train-iters", "9"],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def wait_for(path: Path) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < limit, path
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_notice_saves_and_queues_the_job_again(tmp_path: Path, number: int) -> None:
    job = start(tmp_path, SAVES="yes")
    wait_for(tmp_path / "pid")
    job.send_signal(number)
    output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, output
    assert (tmp_path / "log").read_text() == "scancel --signal=USR1 4242\nrequeue 4242\n"
    assert "saved iter_0000007; job 4242 is queued again" in output
    words = (tmp_path / "args").read_text()
    assert "--rdzv-id 4242.0 " in words and "SIGUSR1" in words
    checkpoints = tmp_path / "run" / "checkpoints"
    assert f"--save {checkpoints} --load {checkpoints} --train-iters 9" in words


def test_a_second_notice_does_not_disturb_the_save(tmp_path: Path) -> None:
    """The time limit's and a preemption's may both come; torchrun ends at once at its second."""
    slow = "trap 'sleep 1; echo iter_0000007 > \"$RUN_DIR/checkpoints/latest\"; exit 1' USR1"
    job = start(tmp_path, SLOW=slow)
    wait_for(tmp_path / "pid")
    job.send_signal(signal.SIGUSR1)
    wait_for(tmp_path / "log")
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0 and output.count("asked to stop") == 1, output
    assert (tmp_path / "log").read_text() == "scancel --signal=USR1 4242\nrequeue 4242\n"


def test_a_job_that_saved_nothing_is_not_queued_again(tmp_path: Path) -> None:
    job = start(tmp_path)
    wait_for(tmp_path / "pid")
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 1 and "not queued again" in output
    assert "requeue" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("code", ["0", "2"])
def test_a_run_that_ends_by_itself_ends_the_job(tmp_path: Path, code: str) -> None:
    job = start(tmp_path, ENDS=code)
    output, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == int(code), output
    assert not (tmp_path / "log").exists()
