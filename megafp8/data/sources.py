"""Where text comes from: JSONL files and plain text files, given by name or found in folders.

A JSONL file holds one record a line; a plain text file is one document. Everything is read as bytes
and decoded strictly: a file that is not UTF-8 is a bad record, never a replacement character.
"""

import codecs
import fnmatch
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson")
DEFAULT_GLOBS = ("*.jsonl", "*.txt")

# Files left out of folders that a report names.
_NAMED = 8

# First bytes of compressed files, which are often handed over as they were downloaded.
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh9": "bzip2",
}


class BadRecord(Exception):  # noqa: N818 - it is an outcome that the caller counts
    """A record that cannot be used.

    Args:
        kind: Short name under which it is counted, such as "invalid UTF-8".
        detail: What exactly is wrong, for the message.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class RawRecord:
    """One record as it was found.

    Attributes:
        path: File.
        line: 1-based line of a JSONL file; 0 for a plain text file.
        content: The line without its end; None for a text file, which is read by whoever uses it.
    """

    path: str
    line: int
    content: bytes | None

    @property
    def place(self) -> str:
        """File, with the line where there is one."""
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True)
class Inputs:
    """The files that `--input` stands for.

    Attributes:
        files: In the order of the inputs; those of a folder sorted by their path.
        left_out: What of the folders is not read and was not excluded by name: files that no
            pattern matches, hidden files and folders, links to what is read already or is not
            there. Those that look like text come first.
    """

    files: list[Path]
    left_out: list[str]

    def line(self) -> str:
        """One line for a report."""
        count = len(self.files)
        return f"read {count} file{'' if count == 1 else 's'}{self.others}"

    @property
    def others(self) -> str:
        """What is left out, as the end of a sentence; empty if nothing is."""
        count, named = len(self.left_out), self.left_out[:_NAMED]
        more = f" and {count - len(named)} more" if count > len(named) else ""
        return f", left out {count}: {', '.join(named)}{more}" if count else ""


def expand_inputs(
    inputs: Sequence[str], globs: Sequence[str] = DEFAULT_GLOBS, exclude: Sequence[str] = ()
) -> Inputs:
    """Return the files that the inputs stand for.

    Args:
        inputs: Files, and folders that are searched to any depth. Links are followed, and every
            folder and file below an input is taken once, under a name without links if it has one.
        globs: Patterns of file names taken from folders. Files given by name are always taken.
            As in a shell, a hidden file needs a pattern that begins with a dot.
        exclude: Patterns of names below a folder; a file is left out if its name or one of its
            folders matches.

    Raises:
        DataError: An input does not exist, a folder cannot be read or holds no matching file.
    """
    found = Inputs([], [])
    for given in map(Path, inputs):
        if given.is_dir():
            search = _Search(given, globs, exclude)
            inside = Inputs(sorted(search.files, key=Path.as_posix), search.left_out(inputs))
            if not inside.files:
                raise DataError(
                    f"--input {given}: no file matches --glob {' '.join(globs)}{inside.others}"
                )
            found.files.extend(inside.files)
            found.left_out.extend(inside.left_out)
        elif given.is_file():
            found.files.append(given)
        else:
            raise DataError(f"--input {given}: no such file or folder")
    return found


class _Search:
    """The files below a folder: first what lies there, then what links lead to."""

    def __init__(self, folder: Path, globs: Sequence[str], exclude: Sequence[str]) -> None:
        self.files: list[Path] = []
        self._folder, self._globs, self._exclude = folder, globs, exclude
        self._others: list[tuple[Path, str]] = []
        self._links: deque[Path] = deque()
        self._seen: set[str] = set()
        self._visit(folder, os.path.realpath(folder))
        while self._links:
            link = self._links.popleft()
            self._take(link, os.path.realpath(link))

    def left_out(self, inputs: Sequence[str]) -> list[str]:
        """Names below the folder, or whole paths where there is more than one input."""
        others = sorted(self._others, key=lambda entry: (not _is_text(entry[0]), entry[0]))
        if len(inputs) > 1:
            return [f"{path}{what}" for path, what in others]
        return [f"{path.relative_to(self._folder)}{what}" for path, what in others]

    def _visit(self, folder: Path, real: str) -> None:
        self._seen.add(real)
        try:
            entries = sorted(folder.iterdir())
        except OSError as error:
            raise DataError(f"--input {folder}: cannot be read: {error.strerror}") from error
        for path in entries:
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in self._exclude):
                continue
            if path.is_symlink():
                self._links.append(path)
            else:
                # Resolving it would look at every folder above it again.
                self._take(path, os.path.join(real, path.name))

    def _take(self, path: Path, real: str) -> None:
        if real in self._seen:
            self._others.append((path, " (read already)"))
        elif path.is_dir():
            if path.name.startswith("."):
                self._others.append((path, "/"))
            else:
                self._visit(path, real)
        elif path.is_file() and self._matches(path.name):
            self._seen.add(real)
            self.files.append(path)
        else:
            broken = path.is_symlink() and not path.exists()
            self._others.append((path, " (a broken link)" if broken else ""))

    def _matches(self, name: str) -> bool:
        patterns = [one for one in self._globs if one.startswith(".") or not name.startswith(".")]
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _is_text(path: Path) -> bool:
    """Whether a name promises text, packed or not."""
    return any(suffix.lower() in (*JSONL_SUFFIXES, ".txt") for suffix in path.suffixes)


def is_jsonl(path: Path) -> bool:
    """Tell whether a file is read as one JSON record a line."""
    return path.suffix.lower() in JSONL_SUFFIXES


def iterate_records(files: Iterable[Path]) -> Iterator[RawRecord]:
    """Yield the raw records of the files, in order.

    Raises:
        DataError: A file cannot be read.
    """
    for path in files:
        if not is_jsonl(path):
            yield RawRecord(str(path), 0, None)
            continue
        try:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if number == 1:
                        line = line.removeprefix(codecs.BOM_UTF8)
                    yield RawRecord(str(path), number, line.rstrip(b"\r\n"))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def read_texts(record: RawRecord, keys: Sequence[str]) -> list[str]:
    """Return the texts of a record, one for each key.

    Args:
        record: From `iterate_records`.
        keys: JSON keys. A plain text file has one text, which stands for every key. A blank line
            has empty texts.

    Raises:
        BadRecord: The record cannot be used.
    """
    if record.content is None:
        try:
            content = Path(record.path).read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise BadRecord("unreadable file", f"cannot be read: {error.strerror}") from error
        return [_decode(content, "file")] * len(keys)
    if not record.content.strip():
        return [""] * len(keys)
    value = _parse_line(_decode(record.content, "line"))
    return [_text_of(value, key) for key in keys]


def _decode(content: bytes, whole: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        packed = [name for start, name in _COMPRESSED.items() if content.startswith(start)]
        hint = f"; it is compressed ({packed[0]}), unpack it first" if packed else ""
        raise BadRecord(
            "invalid UTF-8",
            f"not UTF-8: byte 0x{content[error.start]:02X} at offset {error.start} of the {whole}"
            + hint,
        ) from None


def _parse_line(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRecord(
            "broken JSON",
            f"broken JSON: {error.msg.removesuffix(' at')} at character {error.pos} of the line; "
            "expected one object a line",
        ) from None
    if not isinstance(value, dict):
        raise BadRecord("not an object", f"expected a JSON object, found {_json_type(value)}")
    return value


def _text_of(value: dict[str, Any], key: str) -> str:
    if key not in value:
        found = ", ".join(repr(name) for name in list(value)[:8]) or "none"
        raise BadRecord("missing key", f"key {key!r} is missing; keys found: {found}")
    text = value[key]
    if not isinstance(text, str):
        raise BadRecord("wrong type", f"key {key!r}: expected a string, found {_json_type(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRecord(
            "lone surrogate",
            f"key {key!r}: lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}",
        ) from None
    return text


def _json_type(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names[type(value)]
