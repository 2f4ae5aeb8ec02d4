"""DCP's `.metadata`, read without running anything that it names.

DCP writes its index as a pickle. A pickle may name any callable and have it called while it is
read, so this reader replaces name lookup: the classes that DCP's index consists of become plain
records, torch's sizes and dtypes become what they are, every other name is refused. The records
are then checked and turned into DCP's own classes. No class of the interpreter is handed to the
pickle: its BUILD instruction can set attributes on a class as well as on an instance.
"""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megafp8.checkpoint.files import METADATA_NAME, RECORD_NAME
from megafp8.checkpoint.record import CheckpointRecord, TensorEntry
from megafp8.errors import CheckpointError

_DCP_METADATA = "torch.distributed.checkpoint.metadata"
# DCP classes that are plain data. `BytesStorageMetadata` is not among them: it stands for a pickled
# object inside a shard, which DCP would load without restriction; megafp8 never writes one.
_RECORDS = frozenset(
    {
        (_DCP_METADATA, "Metadata"),
        (_DCP_METADATA, "TensorStorageMetadata"),
        (_DCP_METADATA, "TensorProperties"),
        (_DCP_METADATA, "ChunkStorageMetadata"),
        (_DCP_METADATA, "MetadataIndex"),
        (_DCP_METADATA, "StorageMeta"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
)

# What Megatron-core's `torch_dist` index names beside them; all of it is read over.
_FOREIGN_RECORDS = frozenset(
    {
        (_DCP_METADATA, "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.planner", "SavePlan"),
        ("torch.distributed.checkpoint.planner", "WriteItem"),
        ("torch.distributed.checkpoint.planner", "TensorWriteData"),
        ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
        ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    }
)


class _Record:
    """Stands in for one of DCP's classes: keeps the state it was pickled with, does nothing."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _RestrictedUnpickler(pickle.Unpickler):
    """Admits DCP's metadata classes, torch sizes, dtypes and layouts; refuses all other names."""

    def __init__(self, file: Any, path: Path, foreign: bool = False) -> None:
        super().__init__(file)
        self.path = path
        records = _RECORDS | _FOREIGN_RECORDS if foreign else _RECORDS
        # Made per file: what a hostile pickle sets on them goes away with this object.
        self.admitted: dict[tuple[str, str], Any] = {
            (module, name): type(name, (_Record,), {}) for module, name in records
        }

        def size(values: Any = ()) -> tuple[int, ...]:
            return _whole_numbers(values, path)

        def word(value: Any) -> str:
            return str(value)

        self.admitted["torch", "Size"] = size
        self.admitted["torch.serialization", "_get_layout"] = word
        self.admitted[_DCP_METADATA, "_MEM_FORMAT_ENCODING"] = word
        if foreign:
            self.admitted["torch.distributed.checkpoint.planner", "WriteItemType"] = word

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickled name stands for; called for every name in the file.

        Raises:
            CheckpointError: the name is not one of DCP's metadata.
        """
        if (module, name) in self.admitted:
            return self.admitted[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise CheckpointError(
            f"{self.path} names {module}.{name}, which is not part of DCP's metadata; nothing of"
            " the file was used"
        )


def read_metadata(
    directory: Path, file_sizes: Mapping[str, int], *, foreign: bool = False
) -> Metadata:
    """Read and check a checkpoint's `.metadata`.

    Args:
        directory: The checkpoint.
        file_sizes: Name to bytes of the files that may be named.
        foreign: It is Megatron-core's: pickled objects may lie beside the tensors, and are left
            out of the result, so that nobody loads them.

    Returns:
        DCP's metadata; every entry is a tensor whose chunks fill it and lie in those files.

    Raises:
        CheckpointError: the file is missing, damaged, names anything but DCP's metadata, or
            describes data that are not there.
    """
    path = directory / METADATA_NAME
    try:
        with path.open("rb") as file:
            root = _RestrictedUnpickler(file, path, foreign).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a damaged pickle raises nearly any type
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    fields = _fields(root, "Metadata", path)
    tensors = _mapping(fields, "state_dict_metadata", path)
    storage = _mapping(fields, "storage_data", path)
    if foreign:
        tensors = {k: v for k, v in tensors.items() if type(v).__name__ != "BytesStorageMetadata"}
        storage = {
            key: value
            for key, value in storage.items()
            if _fields(key, "MetadataIndex", path).get("fqn") in tensors
        }
    metadata = Metadata(
        state_dict_metadata={
            _text(name, path): _tensor(name, record, path) for name, record in tensors.items()
        },
        storage_data={
            _index(key, path): _storage(record, file_sizes, path) for key, record in storage.items()
        },
        storage_meta=StorageMeta(),
        version=str(fields.get("version")),
    )
    _check_chunks(metadata, path)
    return metadata


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}")


def _fields(record: Any, kind: str, path: Path) -> dict[str, Any]:
    if type(record).__name__ != kind or not isinstance(record, _Record):
        raise _damaged(path, f"found {type(record).__name__}, expected {kind}")
    if not isinstance(record.state, dict):
        raise _damaged(path, f"{kind} without fields")
    return record.state


def _mapping(fields: dict[str, Any], name: str, path: Path) -> dict[Any, Any]:
    value = fields.get(name)
    if not isinstance(value, dict):
        raise _damaged(path, f"{name} is {type(value).__name__}, expected dict")
    return value


def _text(value: Any, path: Path) -> str:
    if not isinstance(value, str):
        raise _damaged(path, f"found {type(value).__name__}, expected a name")
    return value


def _whole_numbers(values: Any, path: Path) -> tuple[int, ...]:
    if isinstance(values, (tuple, list)) and all(type(value) is int for value in values):
        if all(value >= 0 for value in values):
            return tuple(values)
    raise _damaged(path, f"found a size or offset of {values!r:.100}")


def _tensor(name: str, record: Any, path: Path) -> TensorStorageMetadata:
    fields = _fields(record, "TensorStorageMetadata", path)
    properties = fields.get("properties")
    # DCP pickles the properties as the tuple (dtype, layout, requires_grad, format, pinned); only
    # the dtype says anything about the stored bytes.
    state = properties.state if isinstance(properties, _Record) else None
    if not (isinstance(state, tuple) and state and isinstance(state[0], torch.dtype)):
        raise _damaged(path, f"tensor {name} without a dtype")
    chunks = fields.get("chunks")
    if not isinstance(chunks, list):
        raise _damaged(path, f"tensor {name} without chunks")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=state[0]),
        size=torch.Size(_whole_numbers(fields.get("size"), path)),
        chunks=[_chunk(chunk, path) for chunk in chunks],
    )


def _chunk(record: Any, path: Path) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata", path)
    return ChunkStorageMetadata(
        offsets=torch.Size(_whole_numbers(fields.get("offsets"), path)),
        sizes=torch.Size(_whole_numbers(fields.get("sizes"), path)),
    )


def _index(record: Any, path: Path) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex", path)
    offset = _whole_numbers(fields.get("offset"), path)
    return MetadataIndex(_text(fields.get("fqn"), path), offset)


def _storage(record: Any, file_sizes: Mapping[str, int], path: Path) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo", path)
    name = _text(fields.get("relative_path"), path)
    if name not in file_sizes:
        raise _damaged(path, f"it points into '{name}', which is no file of this checkpoint")
    if fields.get("transform_descriptors"):
        raise CheckpointError(
            f"{path} asks for stream transforms {fields['transform_descriptors']!r:.100},"
            " which megafp8 does not write"
        )
    offset, length = _whole_numbers((fields.get("offset"), fields.get("length")), path)
    if offset + length > file_sizes[name]:
        raise _damaged(
            path, f"it points to byte {offset + length} of '{name}', which has {file_sizes[name]}"
        )
    return _StorageInfo(name, offset, length)


def check_index(directory: Path, record: CheckpointRecord, metadata: Metadata) -> None:
    """Compare the tensors that a record names with those of DCP's index.

    Raises:
        CheckpointError: names, shapes or dtypes differ.
    """
    stored: dict[str, TensorEntry] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), name
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        stored[name] = TensorEntry(tuple(tensor.size), dtype)
    head = f"{directory} is damaged: {RECORD_NAME} and {METADATA_NAME}"
    if stored.keys() != record.tensors.keys():
        names = sorted(stored.keys() ^ record.tensors.keys())
        raise CheckpointError(f"{head} name different tensors: {', '.join(names[:5])}")
    for name, entry in record.tensors.items():
        found = stored[name]
        if found != entry:
            raise CheckpointError(
                f"{head} differ: {name} is {found.dtype}{list(found.shape)} in the latter, "
                f"{entry.dtype}{list(entry.shape)} in the former"
            )


def _check_chunks(metadata: Metadata, path: Path) -> None:
    """Refuse an index with holes: DCP would leave the elements of a hole as they were."""
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        filled = 0
        for chunk in tensor.chunks:
            if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size) or any(
                offset + length > whole
                for offset, length, whole in zip(
                    chunk.offsets, chunk.sizes, tensor.size, strict=True
                )
            ):
                raise _damaged(path, f"a chunk of {name} lies outside {list(tensor.size)}")
            if MetadataIndex(name, chunk.offsets) not in metadata.storage_data:
                raise _damaged(path, f"a chunk of {name} at {list(chunk.offsets)} is not stored")
            filled += math.prod(chunk.sizes)
        if filled != math.prod(tensor.size):
            raise _damaged(path, f"{name} has {filled} of {math.prod(tensor.size)} elements stored")
        if len(tensor.chunks) > 1 and _overlap(tensor.chunks):
            raise _damaged(path, f"chunks of {name} overlap, so that others of its elements lack")


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Tell whether two parts have an element in common; quick where they are cut along one axis."""
    filled = [chunk for chunk in chunks if 0 not in chunk.sizes]
    rank = len(chunks[0].sizes)
    axis = max(range(rank), key=lambda dim: len({chunk.offsets[dim] for chunk in filled}))
    filled.sort(key=lambda chunk: chunk.offsets[axis])
    open_parts: list[ChunkStorageMetadata] = []
    for chunk in filled:
        start = chunk.offsets[axis]
        open_parts = [one for one in open_parts if one.offsets[axis] + one.sizes[axis] > start]
        for one in open_parts:
            if all(
                one.offsets[dim] < chunk.offsets[dim] + chunk.sizes[dim]
                and chunk.offsets[dim] < one.offsets[dim] + one.sizes[dim]
                for dim in range(rank)
            ):
                return True
        open_parts.append(chunk)
    return False
