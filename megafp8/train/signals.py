"""Signals that ask a run to save and end: noted when they arrive, acted upon between iterations.

A handler that only notes cannot interrupt a save or a collective, however often a signal comes.
"""

import signal
from types import FrameType

# SIGTERM is what schedulers and launchers send before they kill; SIGUSR1 is what Slurm's --signal
# is commonly told to send some time before that.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


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


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15."""
    return signal.Signals(number).name
