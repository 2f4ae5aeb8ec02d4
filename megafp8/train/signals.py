"""Signals that end a run: with a save between iterations, or at once.

A handler that only notes cannot interrupt a save or a collective, however often a signal comes.
That is right for what schedulers send. Ctrl-C comes from somebody who wants the terminal back.
"""

import os
import signal
import threading
from types import FrameType

# SIGTERM is what schedulers and launchers send before they kill; SIGUSR1 is what Slurm's --signal
# is commonly told to send some time before that.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
INTERRUPTED = 130  # what shells report for a program that SIGINT ended


class StopSignals:
    """Notes the first signal that asked this process to end.

    Attributes:
        received: Its number; 0 as long as there was none.
    """

    def __init__(self) -> None:
        self.received = 0

    def install(self) -> None:
        """Handle `STOP_SIGNALS` from now on; only the main thread may call this."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number


class Interrupt:
    """SIGINT: the first one raises `KeyboardInterrupt`, a second one ends the process on the spot.

    Python's own handler would raise the second one too, inside whatever cleans up after the first.

    Attributes:
        received: Whether there was one.
    """

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """Handle SIGINT from now on, unless the process was started with it ignored (`nohup`)."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(INTERRUPTED)
        self.received = True
        raise KeyboardInterrupt


def ignore_signals() -> None:
    """Let no signal handled here change the exit code of a process that is about to end.

    Launchers signal the other ranks as soon as one has left, and Python takes our handlers away
    before it has unloaded everything, which with torch takes a good part of a second.
    """
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15."""
    return signal.Signals(number).name
