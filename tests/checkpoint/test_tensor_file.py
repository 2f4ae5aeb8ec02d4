"""A tensor inside a `torch.save` archive, seen where it lies; whatever is not one is left alone."""

import io
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import load_tensors, save_checkpoint
from megafp8.checkpoint.inspect import compare_checkpoints
from megafp8.checkpoint.rewrite import write_streaming
from megafp8.checkpoint.streaming import TensorReader
from megafp8.checkpoint.tensor_file import bytes_view, locate_tensor, view_tensor
from tests.checkpoint.sharded import record


def archive(value: object) -> memoryview:
    stream = io.BytesIO()
    torch.save(value, stream)
    return memoryview(bytearray(stream.getvalue()))


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_a_plain_tensor(dtype: torch.dtype) -> None:
    value = torch.arange(24).reshape(2, 3, 4).to(dtype)
    seen = view_tensor(archive(value))
    assert seen is not None and seen.dtype == dtype and torch.equal(seen, value)


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
def test_any_strides(value: Tensor) -> None:
    seen = view_tensor(archive(value))
    assert seen is not None and torch.equal(seen, value)


def test_a_part_of_a_storage_begins_where_it_does() -> None:
    value = torch.arange(10.0)[3:7]
    memory = archive(value)
    stored = locate_tensor(memory)
    assert stored is not None and stored.first_byte is not None
    found = torch.frombuffer(memory, dtype=value.dtype, count=4, offset=stored.first_byte)
    assert torch.equal(found, value)


def test_nothing_is_copied() -> None:
    memory = archive(torch.arange(4.0))
    seen = view_tensor(memory)
    assert seen is not None
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert start < seen.data_ptr() < start + len(memory)


@pytest.mark.parametrize(
    "value", [{"a": torch.ones(2)}, [1, 2], "text", torch.ones(2).to(torch.float8_e4m3fn)]
)
def test_anything_else_is_for_torch_load(value: object) -> None:
    assert view_tensor(archive(value)) is None


def with_pickle(content: bytes) -> memoryview:
    """An archive of a tensor with another description."""
    source, target = zipfile.ZipFile(io.BytesIO(archive(torch.ones(4)))), io.BytesIO()
    with zipfile.ZipFile(target, "w") as files:
        for name in source.namelist():
            files.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    return memoryview(bytearray(target.getvalue()))


def description(count: int = 4, offset: int = 0, size: int = 4, stride: int = 1) -> bytes:
    """A pickle as torch writes it, with any numbers."""

    class Writer(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", count) if obj == "s" else None

    class Plain:
        def __reduce__(self) -> tuple[object, ...]:
            arguments = ("s", offset, (size,), (stride,), False, {})
            return torch._utils._rebuild_tensor_v2, arguments

    stream = io.BytesIO()
    Writer(stream, protocol=2).dump(Plain())
    return stream.getvalue()


def test_descriptions_that_reach_outside_are_not_followed() -> None:
    good = view_tensor(with_pickle(description()))
    assert good is not None and torch.equal(good, torch.ones(4))
    for bad in (
        description(count=400, size=400),
        description(size=5),
        description(offset=1),
        description(offset=-1),
        description(stride=2),
        description(stride=-1),
    ):
        assert view_tensor(with_pickle(bad)) is None


def test_a_description_runs_nothing(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    content = f"cos\nmkdir\n(S'{proof}'\ntR.".encode()
    assert view_tensor(with_pickle(content)) is None
    assert not proof.exists()
    pickle.loads(content)  # it would have
    assert proof.is_dir()


@pytest.mark.parametrize("content", [b"", b"PK", b"no archive" * 50])
def test_damage_is_no_tensor(content: bytes) -> None:
    assert view_tensor(memoryview(bytearray(content))) is None
    whole = archive(torch.ones(4))
    assert view_tensor(whole[: len(whole) // 2]) is None


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


def test_float8_goes_through_a_checkpoint_all_the_same(tmp_path: Path) -> None:
    value = torch.arange(8.0).to(torch.float8_e4m3fn)
    path = save_checkpoint(tmp_path, 1, {"w": value, "v": torch.ones(2)}, record(1))
    blank = {"w": torch.zeros_like(value), "v": torch.zeros(2)}
    load_tensors(path, blank)
    assert torch.equal(blank["w"].view(torch.uint8), value.view(torch.uint8))
    assert torch.equal(blank["v"], torch.ones(2))
