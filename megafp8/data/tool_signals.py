"""How a tool ends when it is asked to: what is half written is cleared up first."""

import math
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

# What schedulers, `kill` and a closed terminal send.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 5.0  # within which a signal is one more of the same request


class Ended(BaseException):
    """A signal that asked the tool to end, raised where it found it so that all is cleared up.

    Attributes:
        name: of the signal, "SIGTERM".
        exit_code: 128 and the signal's number, as shells say it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = signal.Signals(number).name
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
