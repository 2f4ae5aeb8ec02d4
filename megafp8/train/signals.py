"""Signals that end a run: with a save between iterations, or at once.

A handler that only notes cannot interrupt a save or a collective, however often a signal comes.
That is right for what schedulers send. Ctrl-C comes from somebody who wants the terminal back.

Before the first iteration there is nothing to save, and much to wait for: other ranks, locks, file
systems. There every signal ends the process at once. Python runs a handler only when the main
thread comes back from the library that it waits in, which may be never; so a thread, which hears of
a signal at once, ends the process where the main thread has not done it after some seconds.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from megafp8.command.ending import INTERRUPTED, signal_name
from megafp8.errors import PeerError, StoppedBySignal

# SIGTERM is what schedulers and launchers send before they kill; SIGUSR1 is what Slurm's --signal
# is commonly told to send some time before that.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SET_UP_GRACE = 3.5  # seconds that the main thread has to leave in order


class StopSignals:
    """Notes the first signal that asked this process to end.

    Attributes:
        received: Its number; 0 as long as there was none.
        pending: As `received`, with SIGINT among them, for as long as the run is set up; else 0.
        where: Tells what the process is doing, for the line about its end.
        fault: Tells what another process failed with, which a launcher answers with SIGTERM; "" if
            none did.
    """

    def __init__(self) -> None:
        self.received = 0
        self.pending = 0
        self.where: Callable[[], str] = lambda: "set-up"
        self.fault: Callable[[], str] = lambda: ""
        self._setting_up = False
        self._raises = False

    def install(self) -> None:
        """Handle `STOP_SIGNALS` from now on; only the main thread may call this."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def guard_set_up(self, tell: Callable[[str], None], grace: float = SET_UP_GRACE) -> None:
        """Until `settle`, let a signal that is handled end the process, wherever it waits.

        The main thread raises `StoppedBySignal`, or `KeyboardInterrupt` for SIGINT. Where it is
        still there after the grace, the process ends all the same. Only the main thread may call
        this.

        Args:
            tell: Prints the line about such an end.
            grace: In seconds.
        """
        self._setting_up = self._raises = True
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        arguments = (reading, tell, grace)
        threading.Thread(target=self._guard, args=arguments, name="signals", daemon=True).start()

    def defer(self) -> None:
        """Only note signals from now on: the ranks are about to ask each other for them."""
        self._raises = False

    def settle(self) -> None:
        """Leave the set-up behind: whoever waits from now on waits for its end."""
        self._setting_up = self._raises = False
        self.pending = 0

    def stop_line(self, number: int) -> str:
        """Say that a signal has ended a run that had not begun."""
        return (
            f"{signal_name(number)} before the first iteration, at {self.where()}: nothing was "
            "trained or saved; to go on: the same command"
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self._raises:
            self._raises = False
            self.pending = self.pending or number
            raise StoppedBySignal(number)

    def _guard(self, reading: int, tell: Callable[[str], None], grace: float) -> None:
        interrupts = 0
        deadline: float | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([reading], [], [], left)
            if not ready:
                deadline = None
                if self._setting_up:
                    self._end(tell)
                continue
            for number in os.read(reading, 64):
                interrupts += number == signal.SIGINT
                if interrupts > 1:  # for the handler of a second one, too, the main thread is away
                    os._exit(INTERRUPTED)
                if self._setting_up and number in (*STOP_SIGNALS, signal.SIGINT):
                    deadline = deadline or time.monotonic() + grace
                    self.pending = self.pending or number
                    if number in STOP_SIGNALS:
                        self.received = self.received or number

    def _end(self, tell: Callable[[str], None]) -> None:
        """End the process over the head of its main thread, with the exit code that is due."""
        fault = self.fault()
        text, code = self.stop_line(self.pending), StoppedBySignal.exit_code
        if self.pending == signal.SIGINT:
            text, code = f"interrupted at {self.where()}", INTERRUPTED
        elif fault:
            text, code = f"error: {fault}", PeerError.exit_code
        with contextlib.suppress(OSError, ValueError):
            tell(text)
            sys.stderr.flush()
        os._exit(code)


class Interrupt:
    """SIGINT: the first one raises `KeyboardInterrupt`, a second one ends the process on the spot.

    Python's own handler would raise the second one too, inside whatever cleans up after the first.

    Attributes:
        received: Whether there was one.
    """

    def __init__(self) -> None:
        self.received = False

    def install(self) -> None:
        """Handle SIGINT from now on, unless it is ignored because of a terminal.

        A script's `&` has it ignored, so that Ctrl-C ends what is in the foreground alone. Where
        there is no terminal nobody presses Ctrl-C: whoever sends the signal means this process.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN or not _has_terminal():
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(INTERRUPTED)
        self.received = True
        raise KeyboardInterrupt


def _has_terminal() -> bool:
    """Whether a terminal controls this process."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def ignore_signals() -> None:
    """Let no signal handled here change the exit code of a process that is about to end.

    Launchers signal the other ranks as soon as one has left, and Python takes our handlers away
    before it has unloaded everything, which with torch takes a good part of a second.
    """
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
