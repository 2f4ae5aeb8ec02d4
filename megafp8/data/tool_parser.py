"""What all tools share: their command line, and how they report and end."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megafp8.config.names import suggestion
from megafp8.config.paths import expand_path
from megafp8.data.sources import DEFAULT_GLOBS
from megafp8.data.tool_signals import Ended, ended_by_signals
from megafp8.errors import MegaFP8Error
from megafp8.log import configure


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
            type=path_text,
            metavar="PATH",
            help="JSONL files (.jsonl .json .ndjson), text files (one document each), folders",
        )
        self.add_argument(
            "--glob",
            nargs="+",
            default=list(DEFAULT_GLOBS),
            metavar="PATTERN",
            help="names of files to take from folders, at any depth, through links too; the report "
            "names what is left out",
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
    return Path(_path(text, "a folder"))


def file(text: str) -> Path:
    """The type of a flag that names a file."""
    return Path(_path(text, "a file"))


def path_text(text: str) -> str:
    """The type of a flag whose text is a path, or the beginning of one."""
    return _path(text, "a path")


def _path(text: str, what: str) -> str:
    """One place for every path of every tool; a test holds them to it."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"it is empty, expected {what}")
    try:
        return expand_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed {error}") from None


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


def run_tool(work: Callable[[], list[str]]) -> int:
    """Run a tool's work, print its report lines, and return the exit code.

    Exit codes: 0 done, 2 a mistake that one line explains, 130 ended by Ctrl-C, 143 by SIGTERM
    and 129 by SIGHUP.

    Args:
        work: Does everything and returns the lines to print.
    """
    configure(0)
    try:
        with ended_by_signals():
            lines = work()
    except Ended as ended:
        print(f"error: ended by {ended.name}; nothing was written", file=sys.stderr)
        return ended.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    except MegaFP8Error as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        return _report_system_error(error)
    return _print_report(lines)


def _print_report(lines: list[str]) -> int:
    """Print what the finished work returned; whatever ends this, the work is done."""
    try:
        # Names of files that are no UTF-8 must not stop a report.
        print("\n".join(lines).encode(errors="backslashreplace").decode(), flush=True)
    except KeyboardInterrupt:
        print("error: interrupted while printing the report; the work is done", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _report_system_error(error)
    return 0


def _report_system_error(error: OSError) -> int:
    where = "" if error.filename is None else f"{error.filename}: "
    print(f"error: {printable(f'{where}{error.strerror or error}')}", file=sys.stderr)
    return MegaFP8Error.exit_code
