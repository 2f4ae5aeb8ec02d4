"""Runs that a signal, a failing rank or a kill ends: at once, everywhere, and with the reason."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megafp8.launch.main import STOPPED_BY_SIGNAL
from tests.support.launches import TINY, Run, launched, train
from tests.support.limits import PATIENCE_S
from tests.tools.kill_runs import check_folder, kill_runs, losses

FAULTS = "tests.support.faults:"
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")


def command(folder: Path, *more: str) -> list[str]:
    return [
        *TINY,
        *("--run-dir", str(folder), "--load", str(folder / "checkpoints")),
        *("--train-iters", "6", *more),
    ]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


# ------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize(
    ("where", "number", "saved", "more"),
    [
        ("step", signal.SIGTERM, 3, ()),
        ("evaluation", signal.SIGUSR1, 2, ("--eval-interval", "2", "--eval-iters", "3")),
        ("save", signal.SIGTERM, 3, ("--save-interval", "2")),
        ("save", signal.SIGUSR1, None, ("--save-interval", "2", "--async-save")),
    ],
    ids=["step", "evaluation", "save", "async save"],
)
def test_a_signal_to_one_rank_ends_all_with_one_checkpoint(
    tmp_path: Path, where: str, number: int, saved: int | None, more: tuple[str, ...]
) -> None:
    """P26: rank 1 alone gets the signal, twice; the same command goes on from there."""
    argv = command(tmp_path, *TP2, *more)
    patch = FAULTS + "signal_to_self", {"rank": 1, "where": where, "number": number, "times": 2}
    with launched(2, argv, tmp_path / "logs", patch) as run:
        assert run.wait() == [STOPPED_BY_SIGNAL] * 2, run.text()
    reached = check_folder(tmp_path)
    assert reached == saved or (saved is None and reached in (3, 4)), run.text()
    assert "Traceback" not in run.text()
    (stop,) = events(tmp_path, "stop")
    assert stop["reason"] == signal.Signals(number).name and stop["iteration"] == reached
    assert "to go on: the same command" in run.output(0)
    # An evaluation may take longer than a scheduler waits.
    assert ("the evaluation is left out" in run.output(0)) is (where == "evaluation")
    if where == "step":
        again = train(2, argv, tmp_path / "again")
        assert check_folder(tmp_path) == 6, again.text()
        assert [row[0] for row in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_signal_in_the_last_iteration_leaves_nothing_to_go_on_with(tmp_path: Path) -> None:
    """All is done, and saved: code 75 would queue a job for nothing. The evaluation is done too."""
    argv = command(tmp_path, "--eval-interval", "99", "--eval-iters", "2")
    patch = FAULTS + "signal_to_self", {"rank": 0, "where": "step 6", "number": signal.SIGTERM}
    with launched(1, argv, tmp_path / "logs", patch) as run:
        assert run.wait() == [0], run.text()
    assert check_folder(tmp_path) == 6 and "SIGTERM came when all was done" in run.output(0)
    assert "iteration 6: validation loss" in run.output(0) and not events(tmp_path, "stop")


@pytest.mark.parametrize(
    ("flag", "value", "reached"),
    [("--exit-interval", "4", 4), ("--exit-duration-in-mins", "1e-6", 1)],
)
def test_a_stop_by_a_limit_is_on_record(
    tmp_path: Path, flag: str, value: str, reached: int
) -> None:
    run = train(1, command(tmp_path, flag, value), tmp_path / "logs")
    assert check_folder(tmp_path) == reached and f"stopping at iteration {reached} ({flag})" in (
        run.output(0)
    )
    (stop,) = events(tmp_path, "stop")
    assert (stop["reason"], stop["iteration"], stop["level"]) == (flag, reached, "info")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_ends_all_ranks_at_once_in_one_line(tmp_path: Path, asynchronous: bool) -> None:
    """As a terminal or torchrun passes it on: to every rank. Nothing is saved, nothing is lost."""
    argv = command(tmp_path, "--save-interval", "2", "--train-iters", "400")
    argv.remove("6")
    argv.remove("--train-iters")
    argv += ["--async-save"] if asynchronous else []
    patch = FAULTS + "slow_steps", {"seconds": 0.05}
    with launched(2, argv, tmp_path / "logs", patch) as run:
        run.wait_for("saved ")
        run.signal(signal.SIGINT)
        assert run.wait(30.0) == [130, 130], run.text()
    text = run.text()
    assert "Traceback" not in text and "Error" not in text and text.count("interrupted") == 1
    line = run.output(0).strip().splitlines()[-1]
    reached = check_folder(tmp_path)
    assert line.startswith("pretrain_gpt.py: interrupted at "), line
    assert f"the last checkpoint is {tmp_path}/checkpoints/iter_{reached:07d} (SIGTERM" in line
    assert reached >= 2 and not (tmp_path / "checkpoints" / ".lock").exists()
    (stop,) = events(tmp_path, "stop")
    assert stop["reason"] == "SIGINT" and stop["iteration"] >= reached


def test_the_handler_can_be_left_out(tmp_path: Path) -> None:
    argv = command(tmp_path, "--no-exit-signal-handler")
    patch = FAULTS + "signal_to_self", {"rank": 0, "where": "step", "number": signal.SIGTERM}
    with launched(1, argv, tmp_path / "logs", patch) as run:
        assert run.wait() == [-signal.SIGTERM], run.text()
    assert check_folder(tmp_path) == 0


# ------------------------------------------------------------------------------- failing ranks


def failing(
    tmp_path: Path, rank: int, kind: str, minutes: float, layout: tuple[str, ...] = TP2
) -> tuple[Run, float]:
    """One of two ranks fails in iteration 3; the run, and how long the other then lived."""
    argv = command(tmp_path, *layout)
    argv[argv.index("--distributed-timeout-minutes") + 1] = str(minutes)
    if "--pipeline-model-parallel-size" in layout:
        argv[argv.index("--num-layers") + 1] = "2"
    other = 1 - rank
    patch = FAULTS + "in_step", {"rank": rank, "iteration": 3, "kind": kind}
    with launched(2, argv, tmp_path / "logs", patch) as run:
        run.wait_for("iteration        2/")
        began = time.monotonic()
        if kind in ("stop", "hang"):
            run.processes[other].join(PATIENCE_S)
        else:
            run.wait()
        took = time.monotonic() - began
        assert run.processes[other].exitcode == 1, run.text()
    return run, took


@pytest.mark.parametrize(
    ("rank", "kind", "layout", "message"),
    [
        (1, "raise", TP2, "rank 1 failed first, at iteration 3: ValueError: planted"),
        (1, "data", PP2, "rank 1 failed first, at iteration 3: OSError: [Errno 5]"),
        (1, "kill", TP2, "rank 1: no sign of life (stopped, killed or cut off)"),
        # Without a launcher it takes the rendezvous store with it.
        (0, "raise", (), "rank 0 failed first, at iteration 3: ValueError: planted"),
    ],
    ids=["raise", "data", "kill", "rank 0"],
)
def test_the_rank_that_failed_first_is_named(
    tmp_path: Path, rank: int, kind: str, layout: tuple[str, ...], message: str
) -> None:
    """P27: the others do not wait for their timeout, and do not show errors of their own."""
    run, took = failing(tmp_path, rank, kind, 5.0, layout)
    other = 1 - rank
    assert took < 200.0, run.text()
    assert message in run.output(other) and "Traceback" not in run.output(other)
    assert f"rank {other} was at iteration 3, in " in run.output(other)
    assert (f"[rank {rank}] Traceback" in run.output(rank)) is (kind != "kill")
    # Nothing that was not saved is taken for saved, and the folder is free again.
    assert check_folder(tmp_path) == 0
    if kind == "kill":
        train(2, command(tmp_path, *layout), tmp_path / "again")


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        ("stop", TP2, "error: rank 1: no sign of life"),
        ("hang", (), "error: rank 1: alive, but not where the others waited until the timeout"),
    ],
    ids=["stopped", "too slow"],
)
def test_a_rank_that_does_not_come_is_named(
    tmp_path: Path, kind: str, layout: tuple[str, ...], message: str
) -> None:
    run, _ = failing(tmp_path, 1, kind, 0.1, layout)
    assert message in run.output(0) and "Traceback" not in run.output(0)
    assert "rank 0 was at iteration 3, in " in run.output(0)


def short_timeout(argv: list[str]) -> list[str]:
    argv[argv.index("--distributed-timeout-minutes") + 1] = "0.1"
    return argv


def test_a_rank_that_builds_an_index_is_waited_for(tmp_path: Path) -> None:
    """For longer than collectives may take."""
    argv = short_timeout(command(tmp_path, *TP2))
    patch = FAULTS + "slow_data", {"rank": 0, "seconds": 8.0}
    with launched(2, argv, tmp_path / "logs", patch) as run:
        assert run.wait() == [0, 0], run.text()


# --------------------------------------------------------------------------------------- kills


LAYOUTS = [(2, False), (2, True), (4, False), (4, True)]


def test_kills_in_saves_lose_nothing(tmp_path: Path) -> None:
    """Six kills on two ranks; `python tests/tools/kill_runs.py --kills 60` is the long form."""
    tally = kill_runs(tmp_path, 6, LAYOUTS[:2], seed=7, per_run=3)
    assert tally.kills == 6 and tally.inside >= 1, tally
    assert any(iteration > 0 for iteration in tally.resumed), tally


@pytest.mark.slow
def test_kills_in_saves_lose_nothing_for_long(tmp_path: Path) -> None:
    tally = kill_runs(tmp_path, 40, LAYOUTS, seed=8)
    assert tally.kills == 40 and tally.inside >= 10
