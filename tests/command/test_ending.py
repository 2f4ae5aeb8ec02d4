"""Signals end a tool's work once, and only its work."""

import os
import signal
import sys

import pytest

from megafp8.command import ending
from megafp8.command.ending import ENDING_SIGNALS, Ended, ended_by_signals, run_tool


def ask(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_repeats_do_not_disturb_what_clears_up(number: int) -> None:
    steps, outside = [], signal.signal(number, signal.SIG_DFL)  # nohup has one of them ignored
    try:
        with pytest.raises(Ended) as end, ended_by_signals():
            try:
                ask(number)
            finally:
                ask(number)
                steps.append("cleared up")
        assert (end.value.exit_code, steps) == (128 + number, ["cleared up"])
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, outside)


def test_a_signal_lost_in_a_finalizer_can_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fragile:
        def __del__(self) -> None:
            ask()

    monkeypatch.setattr(ending, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)
    with pytest.raises(Ended), ended_by_signals():
        Fragile()  # and its `Ended` with it
        ask()


def test_ignored_signals_stay_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` starts a program
    try:
        assert run_tool(lambda: [ask(signal.SIGHUP) or "done"]) == 0
    finally:
        signal.signal(signal.SIGHUP, former)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt, 130, "error: interrupted while printing the report; the work is done"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
    ],
)
def test_what_ends_the_report_is_not_said_of_the_work(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(text: str) -> int:
        raise error

    def work() -> list[str]:
        monkeypatch.setattr(sys.stdout, "write", fails)
        return ["report"]

    assert run_tool(work) == code
    assert capsys.readouterr().err == line + "\n"


def test_a_broken_pipe_inside_the_work_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> list[str]:
        raise BrokenPipeError(32, "Broken pipe")

    assert run_tool(work) == 2
    assert capsys.readouterr().err == "error: Broken pipe\n"
