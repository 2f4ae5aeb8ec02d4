"""Tensors inside the `torch.save` archives of shards, read where they lie; and what is none."""

import io
import pickle
import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megafp8.checkpoint import CheckpointRecord, FileEntry, load_tensors, save_checkpoint
from megafp8.checkpoint.inspect import compare_checkpoints
from megafp8.checkpoint.offline import write_streaming
from megafp8.checkpoint.reader import TensorReader
from megafp8.checkpoint.tensors import bytes_view, entry_of
from megafp8.errors import CheckpointError
from tests.checkpoint.sharded import record


def archive(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def planted(folder: Path, content: bytes, like: Tensor) -> TensorReader:
    """A checkpoint of one tensor, "w", whose index says that `content` is one as `like`."""
    (folder / "shard").write_bytes(content)
    size = like.shape
    index = MetadataIndex("w", torch.Size([0] * len(size)))
    part = ChunkStorageMetadata(index.offset or torch.Size(), size)
    metadata = Metadata(
        {"w": TensorStorageMetadata(TensorProperties(dtype=like.dtype), size, [part])},
        storage_data={index: _StorageInfo("shard", 0, len(content))},
        storage_meta=StorageMeta(),
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    files = {"shard": FileEntry(len(content), f"{zlib.crc32(content):08x}")}
    return TensorReader(folder, CheckpointRecord(1, tensors={"w": entry_of(like)}, files=files))


def filled(reader: TensorReader, like: Tensor) -> Tensor:
    """What a training load makes of "w"."""
    state = {"w": torch.empty(like.shape, dtype=like.dtype)}
    plan = create_default_local_load_plan(dict(state), reader.metadata)
    reader.fill(state, plan.items, ["shard"])
    return state["w"]


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def same(found: Tensor, value: Tensor) -> bool:
    found, value = found.contiguous(), value.contiguous()
    return found.dtype == value.dtype and torch.equal(bytes_view(found), bytes_view(value))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.arange(24).reshape(2, 3, 4).to(dtype)
    reader = planted(tmp_path, archive(value), value)
    assert same(reader.read("w"), value) and same(filled(reader, value), value)
    assert same(reader.read("w", row=1), value[1])


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[3:7],
        torch.arange(12.0)[::5],
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.ones(1).expand(5),
    ],
    ids=["transposed", "part", "steps", "scalar", "empty", "expanded"],
)
def test_any_tensor_is_read_back(tmp_path: Path, value: Tensor) -> None:
    reader = planted(tmp_path, archive(value), value)
    assert same(reader.read("w"), value) and same(filled(reader, value), value)


def test_writing_to_what_was_read_leaves_the_file(tmp_path: Path) -> None:
    reader = planted(tmp_path, archive(torch.ones(4)), torch.ones(4))
    reader.read("w").zero_()
    assert reader.read("w").tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "content",
    [
        archive({"a": torch.ones(2)}),
        archive("text"),
        archive(torch.eye(2).to_sparse()),
        b"PK",
        b"no archive" * 50,
        archive(torch.ones(2, 2))[:600],
    ],
    ids=["dict", "text", "sparse", "short", "other", "half"],
)
def test_what_is_no_tensor_is_refused(tmp_path: Path, content: bytes) -> None:
    reader = planted(tmp_path, content, torch.ones(2, 2))
    for read in (lambda: reader.read("w"), lambda: filled(reader, torch.ones(2, 2))):
        with pytest.raises(CheckpointError, match=r"no tensor is stored where \.metadata"):
            read()


@pytest.mark.parametrize("value", [torch.ones(2, 3), torch.ones(3, 2).double()])
def test_another_tensor_is_refused(tmp_path: Path, value: Tensor) -> None:
    with pytest.raises(CheckpointError, match="w at .* is stored as .*, its index says"):
        planted(tmp_path, archive(value), torch.ones(3, 2)).read("w")


def test_one_value_with_any_stride_goes_through_a_checkpoint(tmp_path: Path) -> None:
    """Columns of a table of FP8 amax windows of length 1 keep the stride of the table."""
    table = torch.arange(12.0).reshape(1, 12)
    parts = {f"column.{i}": table[:, i] for i in range(12)}
    assert parts["column.5"].stride() == (12,)
    paths = [save_checkpoint(tmp_path, 1, parts, record(1))]
    table += 1
    paths.append(save_checkpoint(tmp_path, 2, parts, record(2)))
    load_tensors(paths[0], parts)
    assert table.tolist() == [list(range(12))]
    assert TensorReader.open(paths[0]).read("column.5").tolist() == [5.0]
    assert bytes_view(parts["column.5"]).tolist() == list(struct.pack("<f", 5.0))
    changes = list(compare_checkpoints(*paths))
    assert len(changes) == 12 and {(c.elements, c.largest) for c in changes} == {(1, 1.0)}
    report = reshard_tensors(paths[0], tmp_path / "new")
    assert report["column.5"] == f"{zlib.crc32(struct.pack('<f', 5.0)):08x}"


def reshard_tensors(source: Path, root: Path) -> dict[str, str]:
    """Write a checkpoint again for one rank; {name: CRC-32 as read back}."""
    reader = TensorReader.open(source)
    holding = dict.fromkeys(reader.record.tensors)
    return write_streaming(root, reader.record, [holding], reader.read)[1]
