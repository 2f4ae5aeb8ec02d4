"""Command line parser of the tools in this package's domain: errors are one line, exit code 2."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megafp8.data.sources import DEFAULT_GLOBS
from megafp8.errors import MegaFP8Error
from megafp8.log import configure


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


def printable(text: str) -> str:
    """One line for a terminal: line ends and control characters are spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def run_tool(work: Callable[[], list[str]]) -> int:
    """Run a tool's work, print its report lines, and return the exit code.

    Args:
        work: Does everything and returns the lines to print.
    """
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
