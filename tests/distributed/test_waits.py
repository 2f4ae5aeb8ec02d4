"""Ranks that wait for one another before the first iteration: who for whom, and how it ends."""

import signal
import socket
import time
from pathlib import Path

import pytest

from megafp8.command.ending import INTERRUPTED
from megafp8.launch.main import STOPPED_BY_SIGNAL
from tests.support import launches
from tests.support.launches import TINY, launched
from tests.support.limits import PATIENCE_S, slow

FAULTS = "tests.support.faults:"
# A signal ends a wait after 3.5 s; a machine with other work may be some times slower.
SOON_S = 30.0


def command(folder: Path, *more: str) -> list[str]:
    return [*TINY, "--run-dir", str(folder), "--train-iters", "2", *more]


def with_timeout(argv: list[str], minutes: str) -> list[str]:
    argv[argv.index("--distributed-timeout-minutes") + 1] = minutes
    return argv


@pytest.mark.parametrize(
    ("where", "number", "stuck", "place"),
    [
        slow("data", signal.SIGINT, 1, "the meeting of ranks"),
        ("world", signal.SIGUSR1, 1, "the creation of the process group"),
        slow("groups", signal.SIGINT, 1, "set-up"),
        ("folders", signal.SIGINT, 0, "set-up"),
        slow("model", signal.SIGTERM, 1, "set-up"),
        ("loop", signal.SIGTERM, 1, "set-up"),
        slow("loop", signal.SIGINT, 0, "set-up"),
    ],
)
def test_a_signal_to_one_rank_ends_the_wait_of_all(
    tmp_path: Path, where: str, number: signal.Signals, stuck: int, place: str
) -> None:
    """The rank that waits is inside torch, where no handler of Python's runs."""
    waits, code = 1 - stuck, INTERRUPTED if number == signal.SIGINT else STOPPED_BY_SIGNAL
    patch = FAULTS + "stuck", {"rank": stuck, "where": where}
    with launched(2, command(tmp_path / "run"), tmp_path / "logs", patch) as run:
        run.wait_for("stuck", stuck)
        time.sleep(1.0)  # the other rank may still be on its way there
        run.signal(number, waits)
        assert run.wait(SOON_S) == [code, code], run.text()
    text = run.text()
    assert "Traceback" not in text and "error" not in text.lower(), text
    if number == signal.SIGINT:
        assert run.output(0).count("interrupted at ") == 1, text
    else:
        assert f"{number.name} before the first iteration, at " in run.output(0), text
        assert "to go on: the same command" in run.output(0), text
    if waits == 0:
        assert f"at {place}" in run.output(0), text


def test_a_signal_in_the_opening_of_the_data_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 1 alone gets it, twice, and leaves word before there is a process group."""
    patch = FAULTS + "signal_to_self", {
        "rank": 1, "where": "data", "number": signal.SIGTERM, "times": 2,
    }  # fmt: skip
    with launched(2, command(tmp_path / "run"), tmp_path / "logs", patch) as run:
        assert run.wait() == [STOPPED_BY_SIGNAL] * 2, run.text()
    assert "Traceback" not in run.text()
    assert "SIGTERM before the first iteration" in run.output(0)
    assert not list((tmp_path / "run").glob("checkpoints/iter_*"))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come_is_named_while_it_is_waited_for(
    tmp_path: Path, missing: int
) -> None:
    """And it ends the wait after the timeout, whatever else the limits of the meeting are."""
    argv, waits = with_timeout(command(tmp_path / "run"), "0.1"), 1 - missing
    with launched(2, argv, tmp_path / "logs", (FAULTS + "absent", {"rank": missing})) as run:
        run.wait_for(f"rank {waits} waits for 1 of 2 ranks at 127.0.0.1:", waits)
        run.processes[waits].join(PATIENCE_S)
        assert run.processes[waits].exitcode == 2, run.text()
    last = run.output(waits).splitlines()[-1]
    assert last.startswith(f"pretrain_gpt.py: error: rank {waits} waits for 1 of 2 ranks at "), last
    assert f"rank {missing}" in last and "no sign of life for 6 s" in last, last
    assert "frame #" not in run.text() and "[c10d]" not in run.text(), run.text()


def test_a_rank_that_fails_before_it_comes_is_not_waited_for(tmp_path: Path) -> None:
    with launched(
        2, command(tmp_path / "run"), tmp_path / "logs", (FAULTS + "no_data", {"rank": 1})
    ) as run:
        assert run.wait() == [1, 2], run.text()
    assert "error: rank 1 failed first, at the opening of the data: DataError: p.idx" in (
        run.output(0)
    )


def test_a_launchers_signal_after_a_failure_is_not_told_in_its_place(tmp_path: Path) -> None:
    """As torchrun sends it to the ranks that are left."""
    patch = FAULTS + "no_data_beside_a_wait", {"rank": 1, "waits": 0}
    with launched(2, command(tmp_path / "run"), tmp_path / "logs", patch) as run:
        run.wait_for("stuck")
        run.processes[1].join(PATIENCE_S)
        run.signal(signal.SIGTERM, 0)
        assert run.wait(SOON_S) == [1, 2], run.text()
    text = run.output(0)
    assert "error: rank 1 failed first, at the opening of the data: DataError: p.idx" in text
    assert "SIGTERM" not in text, text


@pytest.mark.slow
def test_a_name_that_does_not_resolve_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "MASTER_ADDR", "no-such-host.invalid")
    argv = command(tmp_path / "run")
    with launched(2, argv, tmp_path / "logs", (FAULTS + "absent", {"rank": 1})) as run:
        run.processes[0].join(PATIENCE_S)
        assert run.processes[0].exitcode == 2, run.text()
    (error,) = [line for line in run.output(0).splitlines() if "error" in line]
    assert "MASTER_ADDR: found no-such-host.invalid does not resolve: " in error
    assert "frame #" not in run.text() and "[c10d]" not in run.text(), run.text()


def test_a_tracker_behind_a_dead_proxy_holds_no_rank_up(tmp_path: Path) -> None:
    """The service takes the connection and never answers."""
    argv = with_timeout(command(tmp_path / "run", "--wandb-project", "p"), "0.5")
    with socket.create_server(("127.0.0.1", 0)) as service:
        patch = FAULTS + "dead_service", {"port": service.getsockname()[1]}
        with launched(2, argv, tmp_path / "logs", patch) as run:
            assert run.wait() == [0, 0], run.text()
    text = run.output(0)
    assert text.count("Weights & Biases") == 1, text
    assert "Weights & Biases goes on offline: no answer within 1 s" in text
    assert "offline point 1" in text and "offline point 2" in text and "offline end" in text


def test_the_time_limit_counts_what_was_set_up(tmp_path: Path) -> None:
    """A scheduler counts from the start of the program, too."""
    argv = command(tmp_path / "run", "--exit-duration-in-mins", "0.1")
    argv[argv.index("--train-iters") + 1] = "4"
    with launched(1, argv, tmp_path / "logs", (FAULTS + "slow_model", {"seconds": 6.0})) as run:
        assert run.wait() == [0], run.text()
    assert "stopping at iteration 1 (--exit-duration-in-mins)" in run.output(0)
