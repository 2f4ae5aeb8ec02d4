"""The command line of the tools; values are read as those of `pretrain_gpt.py` are."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megafp8.command.ending import one_line
from megafp8.config.names import suggestion
from megafp8.config.paths import expand_path
from megafp8.config.text import RawText, convert
from megafp8.data.sources import DEFAULT_GLOBS
from megafp8.errors import ConfigurationError


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
        for kind in (int, float):
            self.register("type", kind, _typed(kind))

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
        self.exit(2, f"error: {one_line(message)} (--help lists the flags)\n")

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


def to_path(text: str) -> Path:
    """The type of a flag that names a file or a folder."""
    return Path(path_text(text))


def path_text(text: str) -> str:
    """The type of a flag whose text is a path, or the beginning of one.

    One place for every path of every tool; the shell's empty variable is not the current folder.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty, expected a path")
    try:
        return expand_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed {error}") from None


def positive(text: str) -> int:
    """The type of a flag that takes 1, 2, 3, ..."""
    if (value := _typed(int)(text)) < 1:
        raise argparse.ArgumentTypeError(f"found {value}, allowed a positive integer")
    return value


def _typed(kind: type) -> Callable[[str], Any]:
    def convert_text(text: str) -> Any:
        try:
            return convert(RawText(text, "it"), kind)
        except ConfigurationError as error:  # argparse says which flag
            raise argparse.ArgumentTypeError(str(error).removeprefix("it: ")) from None

    return convert_text
