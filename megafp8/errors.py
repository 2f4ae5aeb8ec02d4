"""The exception family of megafp8.

Everything that a user can cause derives from `MegaFP8Error`: entry points print its message as one
line (what, where, found, allowed) and end with its `exit_code`. Programmer errors stay `assert`.
"""


class MegaFP8Error(ValueError):
    """Base of all errors that are shown to the user as one line."""

    exit_code: int = 2


class ConfigurationError(MegaFP8Error):
    """A flag, a YAML key, or a combination of them that cannot be met."""


class DataError(MegaFP8Error):
    """A corpus, an index, a blend or a tokenizer that cannot be used."""


class CheckpointError(MegaFP8Error):
    """A checkpoint that is missing, partial, damaged or of another model."""


class PrecisionError(MegaFP8Error):
    """A precision request that cannot be met, or a rule that matches nothing."""


class LaunchError(MegaFP8Error):
    """A world size, rendezvous or device that does not fit the run."""


class MeetingError(LaunchError):
    """Ranks that have not come to the rendezvous.

    Attributes:
        speaks: Whether this rank is the one that tells.
    """

    def __init__(self, message: str, speaks: bool) -> None:
        super().__init__(message)
        self.speaks = speaks


class PeerError(MegaFP8Error, RuntimeError):
    """This rank had to stop because another one failed, stopped or vanished; names that one.

    Attributes:
        speaks: Whether this rank is the one that tells.
    """

    exit_code: int = 1

    def __init__(self, message: str, speaks: bool) -> None:
        super().__init__(message)
        self.speaks = speaks


class TrainingError(MegaFP8Error, RuntimeError):
    """A running training that has to stop (non-finite loss, too many skipped steps).

    The input was valid, so the exit code is 1 and not 2. It is a RuntimeError as well, for code
    that tells failures at run time from wrong input.
    """

    exit_code: int = 1


class StoppedBySignal(BaseException):
    """A signal that came before the first iteration, raised in the main thread to end the process.

    No error: nothing that clears up after errors alone may take it for one.

    Attributes:
        number: Of the signal.
    """

    exit_code: int = 75  # EX_TEMPFAIL of sysexits.h: try again later

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
