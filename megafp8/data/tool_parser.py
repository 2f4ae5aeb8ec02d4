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
from typing import Any, NoReturn

from megafp8.config.names import suggestion
from megafp8.data.sources import DEFAULT_GLOBS
from megafp8.errors import MegaFP8Error
from megafp8.log import configure

# What schedulers, `kill` and a closed terminal send.
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class _Help(argparse.HelpFormatter):
    """Says what is required, and the defaults that there are."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if action.required and action.option_strings:
            return f"{text} (required)"
        if default is None or default is False or default in ("", [], argparse.SUPPRESS):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{text} (default {shown.replace('%', '%%')})"


class ToolParser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviations and without the usage text before an error.

    A flag given twice is an error (argparse takes the last), an unknown one comes with the nearest
    name, before what is required and missing.
    """

    def __init__(self, description: str) -> None:
        super().__init__(description=description, allow_abbrev=False, formatter_class=_Help)
        self.register("type", int, _integer)
        self.register("type", float, _number)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line; a mistake ends the process with one line."""
        given = sys.argv[1:] if args is None else list(args)
        seen: set[str] = set()
        for token in given[: given.index("--")] if "--" in given else given:
            name = token.partition("=")[0]
            if not name.startswith("--") or " " in name:
                continue
            if name not in self._option_string_actions:
                known = list(self._option_string_actions)
                self.error(f"{name}: unknown option{suggestion(name, known)}")
            if name in seen:
                self.error(f"{name}: given twice; give it once")
            seen.add(name)
        return super().parse_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        self.exit(2, f"error: {' '.join(message.split())} (--help lists the flags)\n")

    def add_input_arguments(self) -> None:
        """Add the flags that say which text to read."""
        self.add_argument(
            "--input",
            nargs="+",
            required=True,
            type=filled,
            metavar="PATH",
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


def filled(text: str) -> str:
    """The type of a flag whose text may not be empty, as the shell's empty variable is."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty, expected a path")
    return text


def positive(text: str) -> int:
    """The type of a flag that takes 1, 2, 3, ..."""
    if (value := _integer(text)) < 1:
        raise argparse.ArgumentTypeError(f"found {value}, allowed a positive integer")
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed a number") from None


def printable(text: str) -> str:
    """One line for a terminal: line ends and control characters are spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
        # Names of files that are no UTF-8 must not stop a report.
        print("\n".join(work()).encode(errors="backslashreplace").decode(), flush=True)
    except MegaFP8Error as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"error: {printable(f'{where}{error.strerror or error}')}", file=sys.stderr)
        return MegaFP8Error.exit_code
    return 0
