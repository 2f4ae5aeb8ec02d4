"""Signals: what ends a run at once, what is only noted, and what changes nothing any more."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import pytest

from megafp8.config import load_config
from megafp8.train.pretrain import _how_to_go_on
from megafp8.train.signals import Interrupt, StopSignals
from tests.support.limits import PATIENCE_S

ROOT = Path(__file__).parents[2]
MODEL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --lr 1e-3 --micro-batch-size 1 --train-iters 2 --mock-data "
    "--vocab-size 99"
).split()


def python(
    code: str, *, ignored: bool = False, terminal: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program in a session of its own, perhaps as a script's `&` starts one."""
    ours, its = pty.openpty()

    def prepare() -> None:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if terminal:
            fcntl.ioctl(its, termios.TIOCSCTTY, 0)

    try:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=prepare,
        )
    finally:
        os.close(ours)
        os.close(its)


def test_the_first_signal_is_noted() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    stop = StopSignals()
    try:
        stop.install()
        assert stop.received == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGUSR1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_second_ctrl_c_does_not_wait_for_what_cleans_up_after_the_first() -> None:
    result = python(
        """
        import os, signal, time
        from megafp8.train.signals import Interrupt
        interrupt = Interrupt()
        interrupt.install()
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        except KeyboardInterrupt:
            assert interrupt.received
            print("cleaning up", flush=True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
            print("not reached")
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "cleaning up\n", "")


def test_a_program_in_the_background_of_a_terminal_stays_deaf_to_ctrl_c() -> None:
    code = """
        import os, signal
        from megafp8.train.signals import Interrupt
        Interrupt().install()
        os.kill(os.getpid(), signal.SIGINT)
        print("alive")
    """
    assert python(code, ignored=True, terminal=True).stdout == "alive\n"
    assert python(code, terminal=True).returncode != 0
    for ignored in (True, False):  # without a terminal somebody has sent it to this process
        assert python(code, ignored=ignored).stdout == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_while_python_ends_does_not_change_the_exit_code(number: int) -> None:
    """torchrun sends SIGTERM to all ranks as soon as one has left, in whatever order they leave."""
    result = python(
        f"""
        import atexit, os, sys
        from megafp8.launch import main
        atexit.register(lambda: os.kill(os.getpid(), {int(number)}))
        main.main = lambda argv, interrupt: 75
        main.run_program([])
        """
    )
    assert (result.returncode, result.stderr) == (75, "")


# In a wait that no handler of Python's interrupts, as those inside torch.
WAIT = """
import ctypes, os, signal, threading
from megafp8.train.signals import Interrupt, StopSignals
Interrupt().install()
stop = StopSignals()
stop.install()
stop.where = lambda: "the wait"
stop.guard_set_up(lambda text: print(text, flush=True), grace=0.3)
{before}
threading.Timer(0.5, os.kill, (os.getpid(), {number})).start()
threading.Timer({limit}, os._exit, (7,)).start()
lock = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGTERM, 75, "SIGTERM before the first iteration, at the wait: nothing was "),
        (signal.SIGUSR1, 75, "SIGUSR1 before the first iteration, at the wait: nothing was "),
        (signal.SIGINT, 130, "interrupted at the wait\n"),
    ],
)
@pytest.mark.parametrize("before", ["", "stop.defer()"])
def test_a_signal_ends_a_wait_inside_a_library(
    number: int, code: int, line: str, before: str
) -> None:
    result = python(WAIT.format(before=before, number=int(number), limit=PATIENCE_S))
    assert (result.returncode, result.stderr) == (code, "")
    assert result.stdout.startswith(line)


def test_a_wait_that_another_ranks_failure_ended_tells_of_that() -> None:
    """Launchers send SIGTERM to the others."""
    before = "stop.fault = lambda: 'rank 3 failed first'"
    result = python(WAIT.format(before=before, number=int(signal.SIGTERM), limit=PATIENCE_S))
    assert (result.returncode, result.stdout) == (1, "error: rank 3 failed first\n")


def test_a_run_that_has_begun_is_not_ended_over_its_head() -> None:
    """What waits there may be a save."""
    result = python(WAIT.format(before="stop.settle()", number=int(signal.SIGTERM), limit=2.0))
    assert (result.returncode, result.stdout) == (7, "")


def test_the_second_ctrl_c_ends_a_wait_inside_a_library() -> None:
    """Where the handler of the first one is still to come."""
    second = f"threading.Timer(0.2, os.kill, (os.getpid(), {int(signal.SIGINT)})).start()"
    before = f"stop.settle(); {second}"
    result = python(WAIT.format(before=before, number=int(signal.SIGINT), limit=PATIENCE_S))
    assert (result.returncode, result.stdout) == (130, "")


def test_a_signal_before_the_first_iteration_raises_once() -> None:
    result = python(
        """
        import os, signal
        from megafp8.errors import StoppedBySignal
        from megafp8.train.signals import StopSignals
        stop = StopSignals()
        stop.install()
        stop.guard_set_up(print)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except StoppedBySignal as ended:
            os.kill(os.getpid(), signal.SIGTERM)  # nothing disturbs what clears up
            print(ended.number == signal.SIGTERM == stop.pending == stop.received)
        """
    )
    assert (result.stdout, result.stderr) == ("True\n", "")


def test_nothing_is_installed_before_it_is_asked_for() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not Interrupt().received


@pytest.mark.parametrize(
    ("flags", "saved", "words"),
    [
        ("--run-dir r --load r/checkpoints", True, "the same command"),
        ("--run-dir r --save s --load s", True, "the same command"),
        ("--run-dir r", True, "the same command with --load r/checkpoints"),
        ("--run-dir r --load r/checkpoints/iter_0000005", True, "with --load r/checkpoints"),
        (
            "--run-dir r --load llama --finetune",
            True,
            "the same command with --load r/checkpoints, without --finetune",
        ),
        ("", True, "with --load r/checkpoints, with --run-dir r"),
        ("--run-dir r", False, "the same command"),
    ],
)
def test_a_run_that_was_ended_early_says_how_to_go_on(flags: str, saved: bool, words: str) -> None:
    config = load_config([*MODEL, *flags.split()])
    folder = Path(config.checkpoint.save or "r/checkpoints")
    text = _how_to_go_on(config, Path("r"), folder, folder / "iter_0000002" if saved else None)
    assert text.startswith("to go on: the same command") and text.endswith(words)
