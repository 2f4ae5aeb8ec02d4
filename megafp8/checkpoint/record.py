"""`megafp8.json`: what a checkpoint says about itself. JSON only, nothing is unpickled."""

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from megafp8.errors import CheckpointError

# 2: the file has a checksum of its own content.
FORMAT_VERSION = 2
# Tensors of further parts of a run's state begin with it; a run may lack them or not know them.
STATE_PREFIX = "state."


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        size: Bytes.
        crc32: zlib's CRC-32 of the bytes, eight hexadecimal digits.
    """

    size: int
    crc32: str


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        shape: Global shape, independent of the layout that saved it.
        dtype: torch's name without the prefix, such as "float32".
    """

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CheckpointRecord:
    """The content of `megafp8.json`.

    A caller of `save_checkpoint` fills what it knows; `tensors` and `files` are found while saving.

    Attributes:
        iteration: Completed iterations.
        config: The resolved configuration, sections as in `config.yaml`.
        layout: Parallel sizes of the run that saved (world_size, tp, pp, fsdp ...); for people and
            tools, since tensors load at any layout.
        data_position: Where the data goes on (consumed_samples ...).
        manifest_sha256: Hash of the precision manifest; None without one.
        state: Further state that is not a tensor (schedules, counters, document framing).
        tensors: Canonical name to shape and dtype.
        files: Name inside the checkpoint directory to size and checksum.
        format_version: Version of the file's form that was read; what is written has the newest.
    """

    iteration: int
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    data_position: dict[str, Any] = field(default_factory=dict)
    manifest_sha256: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Return the record as JSON text in the newest form, keys in a fixed order.

        Raises:
            CheckpointError: a value has no JSON form, or is NaN or infinite.
        """
        content = {**asdict(self), "format_version": FORMAT_VERSION}
        content = {"format_version": content.pop("format_version"), **content}
        try:
            # What a reader will see: JSON knows neither tuples nor keys that are no text.
            content = json.loads(json.dumps(content, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the record of iteration {self.iteration} has no JSON form: {error}"
            ) from error
        content[CHECKSUM] = content_crc32(content)
        return json.dumps(content, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> "CheckpointRecord":
        """Read a record.

        Args:
            text: The file's content.
            path: The file, for messages.

        Raises:
            CheckpointError: no JSON, a newer format version, a field that is missing, unknown or
                of another type, content that is not what its checksum says.
        """
        try:
            content = json.loads(text, parse_constant=_no_number)
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds {type(content).__name__}, expected an object")
        _check_version(content, path)
        _check_checksum(content, path)
        _check_fields(content, path)
        _check_values(content, path)
        content["tensors"] = {
            name: _tensor_entry(name, entry, path) for name, entry in content["tensors"].items()
        }
        content["files"] = {
            name: _file_entry(name, entry, path) for name, entry in content["files"].items()
        }
        return cls(**content)


# Field of the file, not of the record: CRC-32 of all others. Version 1 has none.
CHECKSUM = "content_crc32"

# Field, allowed JSON types. A later version that adds a field also says here what an earlier file,
# which lacks it, means.
_FIELDS: Mapping[str, tuple[type, ...]] = {
    "format_version": (int,),
    "iteration": (int,),
    "config": (dict,),
    "layout": (dict,),
    "data_position": (dict,),
    "manifest_sha256": (str, type(None)),
    "state": (dict,),
    "tensors": (dict,),
    "files": (dict,),
}


# Counters that a run goes on from, where they are there at all: a damaged one must not be believed.
_COUNTERS = (
    ("data_position", "consumed_samples"),
    ("state", "skipped_iterations"),
    ("state", "nan_iterations"),
    ("state", "vocab_size"),
)
# Counts and sizes are 64-bit in torch and in files.
_LARGEST = 2**63 - 1
_FILE_NAME = re.compile(r"[\w.+-]{1,255}", re.ASCII)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def content_crc32(content: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a record's fields but its checksum, however the file is laid out."""
    rest = {name: value for name, value in content.items() if name != CHECKSUM}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}"


def _is_whole(value: Any) -> TypeGuard[int]:
    # bool is an int to Python, not to a reader of this file.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _check_version(content: dict[str, Any], path: Path) -> None:
    version = content.get("format_version")
    if not _is_whole(version) or version == 0:
        raise CheckpointError(f"{path}: format_version is {version!r}, expected a positive number")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format_version is {version}, this megafp8 reads up to {FORMAT_VERSION};"
            " load it with a newer megafp8"
        )


def _check_checksum(content: dict[str, Any], path: Path) -> None:
    """Take the checksum out of the fields, and compare it."""
    if content["format_version"] == 1:
        return
    if CHECKSUM not in content:
        raise CheckpointError(f"{path} is damaged: {CHECKSUM} is missing")
    stored, found = content.pop(CHECKSUM), content_crc32(content)
    if stored != found:
        raise CheckpointError(
            f"{path} is damaged: crc32 of its content {found}, expected {stored!r:.20}"
        )


def _check_fields(content: dict[str, Any], path: Path) -> None:
    missing = [name for name in _FIELDS if name not in content]
    unknown = [name for name in content if name not in _FIELDS]
    if missing or unknown:
        raise CheckpointError(
            f"{path}: fields missing: {missing}, unknown: {unknown}, expected {list(_FIELDS)}"
        )
    for name, types in _FIELDS.items():
        value = content[name]
        if not isinstance(value, types) or (int in types and not _is_whole(value)):
            allowed = " or ".join(kind.__name__ for kind in types)
            raise CheckpointError(f"{path}: {name} is {value!r:.100}, expected {allowed}")


def _check_values(content: dict[str, Any], path: Path) -> None:
    for section, name in _COUNTERS:
        value = content[section].get(name, 0)
        if not _is_whole(value):
            raise CheckpointError(
                f"{path}: {section}.{name} is {value!r:.100}, expected a whole number"
            )
    scaler = content["state"].get("loss_scaler", {})
    if not isinstance(scaler, dict) or not all(type(v) in (int, float) for v in scaler.values()):
        raise CheckpointError(
            f"{path}: state.loss_scaler is {scaler!r:.100}, expected numbers by name"
        )
    fingerprint = content["state"].get("fingerprint")
    if fingerprint is not None and not _is_fingerprint(fingerprint):
        raise CheckpointError(
            f"{path}: state.fingerprint is {fingerprint!r:.100}, expected what corpora and files "
            "were, by field"
        )


def _is_fingerprint(value: Any) -> bool:
    """Whether it has the form that is compared: kind, field of the configuration, facts."""
    named = {"corpora": {"path", "sha256", "documents", "tokens"}, "files": {"path", "sha256"}}
    return isinstance(value, dict) and all(
        isinstance(value.get(kind), dict)
        and all(
            isinstance(entry, dict) and facts <= entry.keys() and isinstance(entry["sha256"], str)
            for entry in value[kind].values()
        )
        for kind, facts in named.items()
    )


def _tensor_entry(name: str, entry: Any, path: Path) -> TensorEntry:
    if (
        name.isprintable()
        and isinstance(entry, dict)
        and entry.keys() == {"shape", "dtype"}
        and isinstance(entry["dtype"], str)
        and entry["dtype"].isidentifier()
        and isinstance(entry["shape"], list)
        and all(_is_whole(length) for length in entry["shape"])
        and math.prod(entry["shape"]) <= _LARGEST
    ):
        return TensorEntry(shape=tuple(entry["shape"]), dtype=entry["dtype"])
    raise CheckpointError(
        f"{path}: tensors[{name!r:.100}] is {entry!r:.100}, expected a shape and a dtype"
    )


def _file_entry(name: str, entry: Any, path: Path) -> FileEntry:
    if name in (".", "..") or not _FILE_NAME.fullmatch(name):
        raise CheckpointError(
            f"{path}: files names {name!a:.100}, which lies outside the checkpoint or is no name"
        )
    if (
        isinstance(entry, dict)
        and entry.keys() == {"size", "crc32"}
        and _is_whole(entry["size"])
        and isinstance(entry["crc32"], str)
    ):
        return FileEntry(size=entry["size"], crc32=entry["crc32"])
    raise CheckpointError(f"{path}: files['{name}'] is {entry!r:.100}, expected a size and a crc32")
