"""How a command ends: what it says, the signals that end it, its exit code.

Exit codes: 0 done, 2 a mistake that one line explains, 130 ended by Ctrl-C, 143 by SIGTERM and 129
by SIGHUP. Before a signal ends a tool, what is half written is cleared up.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

from megafp8.errors import MegaFP8Error
from megafp8.log import configure

INTERRUPTED = 130  # what shells report for a program that SIGINT ended
# What schedulers, `kill` and a closed terminal send.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 5.0  # within which a signal is one more of the same request


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15."""
    return signal.Signals(number).name


class Ended(BaseException):
    """A signal that asked the tool to end, raised where it found it so that all is cleared up.

    Attributes:
        name: of the signal, "SIGTERM".
        exit_code: 128 and the signal's number, as shells say it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = signal_name(number)
        self.exit_code = 128 + number


@contextmanager
def ended_by_signals() -> Generator[None, None, None]:
    """Raise `Ended` in the main thread where a signal asks the process to end.

    Without it SIGTERM would leave what is half written until the tool runs again. `timeout` and
    others send it twice, and the second one must not disturb what clears up after the first. Later
    ones count: what is raised inside a finalizer is lost.
    """
    raised, done = -math.inf, False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        now = time.monotonic()
        if not done and now - raised > REPEAT_SECONDS:
            raised = now
            raise Ended(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    for number, handler in former.items():
        if handler is not signal.SIG_IGN:  # `nohup`
            signal.signal(number, note)
    try:
        yield
    finally:
        done = True  # too late to stop it
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def one_line(text: str) -> str:
    """Return one line for a terminal: other control characters than white space are spelled out."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def say(text: str, program: str = "") -> None:
    """Print one line to stderr, after a program's name where several may speak."""
    print(f"{program}: {text}" if program else text, file=sys.stderr, flush=True)


def complain(text: str, program: str = "") -> None:
    """Print one line about a failure to stderr."""
    say(f"error: {one_line(text)}", program)


def show(text: str) -> None:
    """Print to stdout; whoever reads it (`| head`) may have seen enough."""
    try:
        # Names of files that are no UTF-8 must not stop a report.
        sys.stdout.write(text.encode(errors="backslashreplace").decode())
        sys.stdout.flush()
    except BrokenPipeError:
        flush_stdout()


def flush_stdout() -> None:
    """Leave nothing for Python to complain about while it exits, with an exit code of its own."""
    try:
        sys.stdout.flush()
    except OSError:  # who read it has left, or the disk under it is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_tool(work: Callable[[], list[str]]) -> int:
    """Run a tool's work, print its report lines, and return the exit code.

    Args:
        work: Does everything and returns the lines to print.
    """
    configure(0)
    happened = "interrupted; nothing was written"
    try:
        with ended_by_signals():
            lines = work()
        happened = "interrupted while printing the report; the work is done"
        show("\n".join(lines) + "\n")
    except Ended as ended:
        complain(f"ended by {ended.name}; nothing was written")
        return ended.exit_code
    except KeyboardInterrupt:
        complain(happened)
        return INTERRUPTED
    except MegaFP8Error as error:
        complain(str(error))
        return error.exit_code
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        complain(f"{where}{error.strerror or error}")
        return MegaFP8Error.exit_code
    return 0
