"""Command line parser of the tools in this package's domain: errors are one line, exit code 2."""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megafp8.data.sources import DEFAULT_GLOBS
from megafp8.errors import MegaFP8Error
from megafp8.log import configure

# What schedulers, `kill` and a closed terminal send.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class ToolParser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviations and without the usage text before an error."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"error: {message} (--help lists the flags)\n")

    def add_input_arguments(self) -> None:
        """Add the flags that say which text to read."""
        self.add_argument(
            "--input",
            nargs="+",
            required=True,
            metavar="F",
            help="JSONL files (.jsonl .json .ndjson), text files (one document each), folders",
        )
        self.add_argument(
            "--glob",
            nargs="+",
            default=list(DEFAULT_GLOBS),
            metavar="PATTERN",
            help="names of files to take from folders, at any depth",
        )
        self.add_argument(
            "--exclude",
            nargs="+",
            default=[],
            metavar="PATTERN",
            help="names of files and folders to leave out of folders",
        )
        self.add_argument(
            "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of JSONL records"
        )
        self.add_argument(
            "--skip-bad-records",
            action="store_true",
            help="count records that cannot be used and go on, instead of stopping at the first",
        )


def folder(text: str) -> Path:
    """The type of a flag that names a folder; the shell's empty variable is not the current one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty, expected a folder")
    return Path(text)


class _Ended(BaseException):
    """A signal that asked the tool to end, raised where it found it so that all is cleared up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _ended_by_signals() -> Generator[None, None, None]:
    """Raise `_Ended` at the first of the signals that ask a process to end; ignore those after it.

    Without it SIGTERM would leave what is half written until the tool runs again. `timeout` and
    others send it twice, and the second one must not disturb what clears up after the first.
    """
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise _Ended(number)

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
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def run_tool(work: Callable[[], list[str]]) -> int:
    """Run a tool's work, print its report lines, and return the exit code.

    Exit codes: 0 done, 2 a mistake that one line explains, 130 ended by Ctrl-C, 143 by SIGTERM
    and 129 by SIGHUP.

    Args:
        work: Does everything and returns the lines to print.
    """
    try:
        with _ended_by_signals():
            return _run(work)
    except _Ended as ended:
        name = signal.Signals(ended.number).name
        print(f"error: ended by {name}; nothing was written", file=sys.stderr)
        return 128 + ended.number


def _run(work: Callable[[], list[str]]) -> int:
    configure(0)
    try:
        print("\n".join(work()), flush=True)
    except MegaFP8Error as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {where}{error.strerror or error}", file=sys.stderr)
        return MegaFP8Error.exit_code
    return 0
