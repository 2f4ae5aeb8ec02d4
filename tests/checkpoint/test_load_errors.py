"""Nothing is filled that does not match: names, shapes, dtypes, bytes, words of a pickle."""

import json
import logging
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
)

from megafp8.checkpoint import load_tensors, read_record, save_checkpoint, verify_files
from megafp8.checkpoint.metadata import read_metadata
from megafp8.checkpoint.record import content_crc32
from megafp8.errors import CheckpointError
from tests.checkpoint.sharded import record
from tests.support.ranks import Ranks


def is_fp8(name: str) -> bool:
    return name.startswith("fp8.")


def model(*, blank: bool = False, **changes: Tensor | None) -> dict[str, Tensor]:
    """Two weights and a scale; `a_weight=None` leaves one out."""
    tensors = {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b.weight": torch.arange(4.0),
        "fp8.a.scale": torch.tensor(448.0),
    }
    for key, value in changes.items():
        name = key.replace("_", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return {name: torch.full_like(t, -1) for name, t in tensors.items()} if blank else tensors


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, 10, model(), record(10))


def untouched(tensors: dict[str, Tensor]) -> bool:
    return all(bool((tensor == -1).all()) for tensor in tensors.values())


# ------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (model(blank=True, c_weight=torch.zeros(1)), "1 missing: c.weight"),
        (model(blank=True, b_weight=None), "1 unexpected: b.weight"),
        (
            model(blank=True, b_weight=None, x_b_weight=torch.zeros(4)),
            "1 missing: x.b.weight; 1 unexpected: b.weight",
        ),
        (model(blank=True, a_weight=torch.zeros(3, 2)), r"a.weight has shape \[2, 3\], .*\[3, 2\]"),
        (model(blank=True, a_weight=torch.zeros(2, 3).bfloat16()), "a.weight is torch.float32"),
        (model(blank=True, a_weight=torch.zeros(2, 3).double()), "expected torch.float64"),
    ],
)
def test_weights_must_match(saved: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        load_tensors(saved, tensors, is_fp8)
    assert "\n" not in str(raised.value)
    assert untouched(tensors)


def test_scale_state_may_be_missing(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 10, model(fp8_a_scale=None), record(10))
    tensors = model(blank=True)
    with pytest.raises(CheckpointError, match="1 missing: fp8.a.scale"):
        load_tensors(path, tensors)
    assert load_tensors(path, tensors, is_fp8) == ["fp8.a.scale"]
    assert torch.equal(tensors["a.weight"], model()["a.weight"])
    assert tensors["fp8.a.scale"] == -1


def test_scale_state_may_be_dropped(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = model(blank=True, fp8_a_scale=None)
    with pytest.raises(CheckpointError, match="1 unexpected: fp8.a.scale"):
        load_tensors(saved, tensors)
    with caplog.at_level(logging.INFO, logger="megafp8"):
        assert load_tensors(saved, tensors, is_fp8) == []
    assert torch.equal(tensors["b.weight"], model()["b.weight"])
    assert [r.message.split(": ", 1)[1] for r in caplog.records] == [
        "1 stored tensors are not used by this run: fp8.a.scale"
    ]


def test_optional_tensors_must_still_have_the_right_shape(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="fp8.a.scale has shape"):
        load_tensors(saved, model(blank=True, fp8_a_scale=torch.zeros(1)), is_fp8)


def load_differently(directory: str) -> str:
    """Rank 0 asks for a name that is not there, rank 1 for one of another shape."""
    tensors = model(blank=True)
    if dist.get_rank() == 0:
        tensors["c.weight"] = torch.zeros(1)
    else:
        tensors["b.weight"] = -torch.ones(5)
        del tensors["a.weight"]
    with pytest.raises(CheckpointError) as raised:
        load_tensors(Path(directory), tensors)
    assert tensors["b.weight"][0] == -1
    return str(raised.value)


def test_every_rank_names_what_any_rank_found(ranks: Ranks, saved: Path) -> None:
    first, second = ranks.run(load_differently, world_size=2, directory=str(saved))
    assert first == second
    assert "1 missing: c.weight; b.weight has shape [4], expected [5]" in first


# ------------------------------------------------------------------------------------ bytes


def shard_of(path: Path) -> Path:
    return path / "__0_0.distcp"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "is damaged: crc32"),
        (cut, "bytes, expected"),
        (Path.unlink, "is missing, expected"),
    ],
)
def test_damage_is_named_with_the_checkpoint_to_use_instead(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    for iteration in (5, 7, 10):
        path = save_checkpoint(tmp_path, iteration, model(), record(iteration))
    cut(shard_of(tmp_path / "iter_0000007"))  # no help either
    damage(path / name)
    tensors = model(blank=True)
    with pytest.raises(CheckpointError, match=message) as raised:
        load_tensors(path, tensors)
    text = str(raised.value)
    assert str(path / name) in text and f"use --load {tmp_path / 'iter_0000005'} instead" in text
    if (name, damage) != ("__0_0.distcp", flip_a_bit):  # a shard is summed while it is read
        assert untouched(tensors)


@pytest.mark.parametrize("name", ["__0_0.distcp", "megafp8.json"])
def test_a_file_of_another_checkpoint_is_noticed(tmp_path: Path, name: str) -> None:
    """Of the same model and size, so that its bytes alone tell."""
    older = save_checkpoint(tmp_path, 5, model(b_weight=torch.arange(4.0) + 1), record(5))
    newer = save_checkpoint(tmp_path, 10, model(), record(10))
    (older / name).rename(tmp_path / "aside")
    (newer / name).rename(older / name)
    (tmp_path / "aside").rename(newer / name)
    with pytest.raises(CheckpointError, match="__0_0.distcp is damaged: crc32"):
        load_tensors(newer, model(blank=True))


def test_damage_inside_an_archive_is_named_too(saved: Path) -> None:
    """The headers of a shard are looked at before its sum is known; `zipfile` raises all sorts."""
    shard = shard_of(saved)
    whole = shard.read_bytes()
    for position in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged: crc32 .*; no other"):
            load_tensors(saved, model(blank=True))


def test_no_other_checkpoint_to_advise(saved: Path) -> None:
    cut(shard_of(saved))
    with pytest.raises(CheckpointError, match="no other complete checkpoint in"):
        load_tensors(saved, model(blank=True))


def test_damaged_record_is_named(saved: Path) -> None:
    (saved / "megafp8.json").write_text("{")
    with pytest.raises(CheckpointError, match="megafp8.json is not valid JSON"):
        load_tensors(saved, model(blank=True))


def load_shared(directory: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        load_tensors(Path(directory), model(blank=True))
    return str(raised.value)


def test_checksums_are_shared_and_all_ranks_hear_of_damage(ranks: Ranks, saved: Path) -> None:
    flip_a_bit(shard_of(saved))
    messages = ranks.run(load_shared, world_size=2, directory=str(saved))
    assert messages[0] == messages[1]
    # Both read it, one has summed it.
    assert "rank 0: " in messages[0] and messages[0].count("__0_0.distcp is damaged") == 1


def test_verify_files_compares_sizes_alone_on_request(saved: Path) -> None:
    flip_a_bit(shard_of(saved))
    verify_files(saved, read_record(saved), checksums=False)
    with pytest.raises(CheckpointError, match="crc32"):
        verify_files(saved, read_record(saved))


# ------------------------------------------------------------------------------------- index


def plant(directory: Path, content: bytes) -> None:
    """Replace `.metadata` and make the record agree, as someone who means harm would."""
    (directory / ".metadata").write_bytes(content)
    record = json.loads((directory / "megafp8.json").read_text())
    record["files"][".metadata"] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    write_record(directory, record)


def write_record(directory: Path, content: dict[str, Any]) -> None:
    content["content_crc32"] = content_crc32(content)
    (directory / "megafp8.json").write_text(json.dumps(content))


def _outside(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../secret"


def _beyond(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset = 10**6


def _hole(metadata: Metadata) -> None:
    chunk = metadata.state_dict_metadata["a.weight"].chunks[0]
    chunk.sizes = torch.Size([1, 3])


def _too_large(metadata: Metadata) -> None:
    chunk = metadata.state_dict_metadata["a.weight"].chunks[0]
    chunk.sizes = torch.Size([3, 3])


def _twice_the_same(metadata: Metadata) -> None:
    tensor = metadata.state_dict_metadata["a.weight"]
    tensor.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([1, 3]))] * 2


def _of_another_shape(metadata: Metadata) -> None:
    places = {index.fqn: index for index in metadata.storage_data}
    other = next(name for name in places if name != "a.weight")
    metadata.storage_data[places["a.weight"]] = metadata.storage_data[places[other]]


def _between_tensors(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.offset, info.length = info.offset + 7, info.length - 7


def _not_stored(metadata: Metadata) -> None:
    metadata.storage_data.clear()


def _transform(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_outside, "points into '../../secret', which is no file of this checkpoint"),
        (_beyond, "points to byte"),
        (_hole, "a.weight has 3 of 6 elements stored"),
        (_too_large, r"a chunk of a.weight lies outside \[2, 3\]"),
        (_twice_the_same, "chunks of a.weight overlap"),
        (_not_stored, "is not stored"),
        (_transform, "asks for stream transforms"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    saved: Path, change: Callable[[Metadata], None], message: str
) -> None:
    sizes = {name: entry.size for name, entry in read_record(saved).files.items()}
    metadata = read_metadata(saved, sizes)
    change(metadata)
    plant(saved, pickle.dumps(metadata))
    tensors = model(blank=True)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(saved, tensors)
    assert untouched(tensors)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [2, 4], "dtype": "float32"}, r"float32\[2, 3\] in the latter"),
        ({"shape": [2, 3], "dtype": "load"}, r"load\[2, 3\] in the former"),
        (None, "name different tensors: a.weight"),
    ],
)
def test_a_record_and_an_index_that_differ_are_refused(
    saved: Path, entry: dict[str, object] | None, message: str
) -> None:
    content = json.loads((saved / "megafp8.json").read_text())
    del content["tensors"]["a.weight"]
    content["tensors"] |= {} if entry is None else {"a.weight": entry}
    write_record(saved, content)
    tensors = model(blank=True)
    with pytest.raises(CheckpointError, match=message):
        load_tensors(saved, tensors)
    assert untouched(tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_of_another_shape, r"a.weight at \[0, 0\] is stored as "),
        (_between_tensors, r"no tensor is stored where \.metadata says"),
    ],
)
def test_an_index_that_points_at_something_else_is_one_line(
    saved: Path, change: Callable[[Metadata], None], message: str
) -> None:
    sizes = {name: entry.size for name, entry in read_record(saved).files.items()}
    metadata = read_metadata(saved, sizes)
    change(metadata)
    plant(saved, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_tensors(saved, model(blank=True))
    assert "\n" not in str(raised.value)
