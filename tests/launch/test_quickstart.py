"""The quickstart: how long a run fits a machine, and what a later call makes of a run folder."""

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megafp8.errors import MegaFP8Error
from megafp8.launch import quickstart
from megafp8.launch.main import main as train
from megafp8.launch.quickstart import SIZES, Machine, Plan, Size
from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CPU = Machine(gpus=0)

# In the place of Python: what the training command would write and say, in no time. CALLS counts.
LAUNCHER = """#!{python}
import json, os, pathlib, sys
flags = dict(zip(sys.argv, sys.argv[1:]))
open("{calls}", "a").write(" ".join(sys.argv[1:]) + "\\n")
if os.environ.get("FAILS"):
    sys.exit("pretrain_gpt.py: error: " + os.environ["FAILS"])
size = flags["--global-batch-size"] + "/" + flags["--num-layers"]
seconds = json.loads(os.environ["SECONDS"])[size]
lines = [dict(iteration=i + 1, step_time_s=seconds if i else 99.0) for i in range(5)]
text = "".join(json.dumps(line) + "\\n" for line in lines)
pathlib.Path(flags["--run-dir"], "metrics.jsonl").write_text(text)
"""


class Started(Exception):
    """The process would now be the training command."""

    def __init__(self, path: str, command: list[str]) -> None:
        self.flags = dict(zip(command, command[1:], strict=False))


class Folder:
    """A run folder on a machine whose speed is given."""

    def __init__(self, path: Path) -> None:
        self.run, self.data, self.calls = path / "run", path / "run/data", path / "calls"
        self.data.mkdir(parents=True)
        self.calls.touch()

    def start(self, train_iters: int | None = None) -> dict[str, str]:
        with pytest.raises(Started) as started:
            quickstart.main(self.run, self.data, train_iters)
        assert sorted(item.name for item in self.run.iterdir() if "probe" in item.name) == []
        return started.value.flags

    def measured(self) -> int:
        return len(self.calls.read_text().splitlines())

    def has_trained(self, iterations: int) -> None:
        checkpoint = self.run / f"checkpoints/iter_{iterations:07d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "megafp8.json").write_text("{}")
        (self.run / "checkpoints/latest").write_text(checkpoint.name)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    made = Folder(tmp_path)
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER.format(python=sys.executable, calls=made.calls))
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    monkeypatch.setattr(quickstart, "find_machine", lambda: CPU)

    def execv(path: str, command: list[str]) -> None:
        raise Started(path, command)

    monkeypatch.setattr(os, "execv", execv)
    return made


@pytest.mark.parametrize(
    ("seconds", "iterations"), [(0.01, 300), (0.4, 300), (0.79, 150), (2.0, 60), (2.1, 50)]
)
def test_two_minutes_and_no_more_than_300_iterations(seconds: float, iterations: int) -> None:
    assert quickstart.fitting_iterations(seconds) == iterations


@pytest.mark.parametrize(
    ("iterations", "seconds", "line"),
    [
        (150, 0.79, "takes 0.79 s here: 150 iterations fit two minutes (TRAIN_ITERS=N takes"),
        (300, 0.05, "takes 0.05 s here: 300 iterations take 0:00:15 (TRAIN_ITERS=N takes"),
        (40, 6.0, "takes 6.00 s here: 40 iterations take 0:04:00 (TRAIN_ITERS=N takes"),
    ],
)
def test_the_line_that_says_so(iterations: int, seconds: float, line: str) -> None:
    plan = Plan(train_iters=iterations, size=SIZES[0])
    assert line in quickstart.describe_fit(plan, seconds)


@pytest.mark.parametrize(
    ("gpus", "size"),
    [*((gpus, SIZES[0]) for gpus in range(9)), *((0, size) for size in SIZES[1:]), (12, SIZES[3])],
    ids=str,
)
def test_the_command_fits_every_number_of_gpus(
    gpus: int, size: Size, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    machine = Machine(gpus=gpus)
    command = quickstart.training_command(machine, Plan(train_iters=50, size=size), Path("data"))
    flags = command[command.index("pretrain_gpt.py") + 1 :]
    for name in ("--data-path", "--tokenizer-model"):  # which are not there
        at = flags.index(name)
        del flags[at : at + 2]
    assert train([*flags, "--dry-run", "--world-size", str(machine.ranks)], {}) == 0
    assert capsys.readouterr().err == ""


def test_the_schedule_fits_a_short_run() -> None:
    for iterations, warmup, interval in ((1, 0, 1), (7, 3, 3), (40, 20, 14), (600, 20, 100)):
        plan = Plan(train_iters=iterations, size=SIZES[0])
        command = quickstart.training_command(CPU, plan, Path("data"))
        flags = dict(zip(command, command[1:], strict=False))
        assert flags["--train-iters"] == str(iterations)
        assert flags["--lr-warmup-iters"] == str(warmup)
        assert flags["--eval-interval"] == str(interval)
    old = quickstart.training_command(replace(CPU, gpus=4, emulates_fp8=True), plan, Path("data"))
    assert "--fp8-emulate" in old and "--fp8-emulate" not in command


def test_a_run_is_fitted_once_and_gone_on_with(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECONDS", '{"16/4": 0.79}')
    first = folder.start()
    assert (first["--train-iters"], first["--save-interval"]) == ("150", "50")
    assert "an iteration takes 0.79 s here: 150 iterations fit" in capsys.readouterr().out
    assert folder.measured() == 1 and "--exit-interval 5" in folder.calls.read_text()

    monkeypatch.setenv("SECONDS", '{"16/4": 0.1}')  # the machine is free by now
    assert folder.start() == first  # interrupted before its first checkpoint
    folder.has_trained(100)
    assert folder.start() == first
    folder.has_trained(150)
    assert quickstart.main(folder.run, folder.data, None) == 0
    assert quickstart.main(folder.run, folder.data, 60) == 0
    assert capsys.readouterr().out.count("has 150 iterations: nothing to train") == 2
    assert folder.start(300)["--train-iters"] == "300"
    assert folder.start()["--train-iters"] == "300"  # interrupted, and it was to be 300
    assert folder.measured() == 1


def test_a_slow_machine_takes_fewer_samples_and_keeps_to_them(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECONDS", '{"16/4": 3.1, "8/4": 2.1, "4/4": 1.5}')
    first = folder.start()
    assert [first[f"--{name}"] for name in ("train-iters", "global-batch-size", "num-layers")] == [
        "80", "4", "4",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert out.count("too few would fit, so it gets smaller") == 2 == folder.measured() - 1
    assert folder.start() == first
    assert folder.start(500)["--global-batch-size"] == "4" and folder.measured() == 3


def test_the_slowest_machine_trains_longer_than_two_minutes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECONDS", '{"16/4": 10, "4/2": 4}')
    flags = folder.start()
    assert folder.measured() == 2  # what cannot be fast enough is left out
    assert (flags["--train-iters"], flags["--num-layers"]) == ("60", "2")
    assert "60 iterations take 0:04:00" in capsys.readouterr().out


def test_a_number_given_is_taken_and_nothing_measured(folder: Folder) -> None:
    flags = folder.start(7)
    assert (flags["--train-iters"], flags["--global-batch-size"]) == ("7", "16")
    assert folder.measured() == 0


def test_checkpoints_without_a_plan_are_a_finished_run(folder: Folder) -> None:
    folder.has_trained(300)
    assert quickstart.main(folder.run, folder.data, None) == 0
    assert folder.start(301)["--train-iters"] == "301" and folder.measured() == 0


def test_a_failed_probe_ends_in_the_words_of_the_run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", "no memory")
    assert quickstart.run_program([str(folder.run), str(folder.data)]) == 1
    assert capfd.readouterr().err == "pretrain_gpt.py: error: no memory\n"
    assert [item.name for item in folder.run.iterdir()] == ["data"]


@pytest.mark.parametrize("text", ["", "[]", '{"train_iters": 9}', "0", "null"])
def test_a_damaged_plan_is_named(folder: Folder, text: str) -> None:
    (folder.run / quickstart.PLAN_FILE).write_text(text)
    with pytest.raises(MegaFP8Error, match=f"{folder.run}/quickstart.json: .*; remove it"):
        quickstart.main(folder.run, folder.data, None)


# In the place of .venv's Python: notes what the script asks of it; STOPS names what fails.
PYTHON = """#!/usr/bin/env bash
if [[ "$1" == - ]]; then exec {python} "$@"; fi
if [[ "$1" == -c ]]; then echo /stdlib; exit; fi
if [[ "$*" == "-m pip"* ]]; then exit; fi
name="$1"; [[ "$1" != -m ]] || name="$2"
echo "${{name##*/}}" >>{asked}
[[ "${{name}}" != *.launch.* ]] || echo "${{*:5}}" >>{asked}
if [[ -n "${{STOPS:-}}" && "${{name}}" == *"${{STOPS}}"* ]]; then echo "its error" >&2; exit 3; fi
if [[ "${{name}}" == *generate.py ]]; then echo "a sample"; fi
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The scripts with a .venv that is none."""
    place = tmp_path / "project"
    shutil.copytree(ROOT / "scripts", place / "scripts")
    for name in ("requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, place)
    python = place / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(python=sys.executable, asked=tmp_path / "asked"))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return place


def call(project: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    asked = project.parent / "asked"
    asked.write_text("")
    environment = {"PATH": os.environ["PATH"], "RUN_DIR": str(project.parent / "run"), **variables}
    ended = subprocess.run(
        ["bash", "scripts/quickstart.sh"],
        cwd=project, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return ended, asked.read_text().splitlines()


def test_the_script_ends_where_the_training_fails(project: Path) -> None:
    ended, asked = call(project, STOPS="launch.quickstart")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (3, "its error")
    assert asked == ["train_tokenizer.py", "preprocess_data.py", "megafp8.launch.quickstart", ""]
    assert "== sample" not in ended.stdout


def test_the_script_samples_once_and_reports_always(project: Path) -> None:
    ended, asked = call(project, TRAIN_ITERS="9")
    assert ended.returncode == 0 and "a sample\n\n== result\n" in ended.stdout
    assert asked[2:4] == ["megafp8.launch.quickstart", "9"]
    assert asked[4:] == ["generate.py", "megafp8.report.quickstart"]
    ended, asked = call(project)
    assert ended.returncode == 0 and "a sample\n\n== result\n" in ended.stdout
    assert asked[3:] == ["", "megafp8.report.quickstart"]


@pytest.mark.slow
def test_the_quickstart_ends_below_the_unigram_entropy(tmp_path: Path) -> None:
    environment = {**os.environ, "RUN_DIR": str(tmp_path / "run")}
    words = ["bash", str(ROOT / "scripts/quickstart.sh")]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr
    assert "== an iteration takes " in ended.stdout and " nats below it" in ended.stdout
    assert " left\n" in ended.stderr
    again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "iterations: nothing to train" in again.stdout
    assert again.stdout.split("== result\n")[1] == ended.stdout.split("== result\n")[1]
