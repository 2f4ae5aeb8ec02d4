"""DCP's `.metadata` from somebody who means harm: nothing that it names is run or changed."""

import collections
import functools
import importlib
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megafp8.checkpoint import load_tensors, read_record, save_checkpoint
from megafp8.checkpoint.metadata import read_metadata
from megafp8.errors import CheckpointError
from tests.checkpoint.sharded import record
from tests.checkpoint.test_load_errors import model, plant, untouched


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, 10, model(), record(10))


def call(module: str, name: str, argument: str) -> bytes:
    """Return a pickle that calls `module.name(argument)` while it is read."""
    return f"c{module}\n{name}\n(S{argument!r}\ntR.".encode()


def test_our_own_metadata_names_no_path(saved: Path) -> None:
    content = (saved / ".metadata").read_bytes()
    assert b"tmp_iter" not in content and b"pathlib" not in content


@pytest.mark.parametrize(
    ("module", "name", "argument"),
    [
        ("os", "mkdir", "{proof}"),
        ("posix", "system", "touch {proof}"),
        ("builtins", "eval", "open('{proof}', 'w')"),
        ("builtins", "getattr", "{proof}"),
        ("torch", "load", "{proof}"),
        ("torch", "ones", "{proof}"),
        ("torch.serialization", "load", "{proof}"),
        ("torch.distributed.checkpoint.filesystem", "FileSystem", "{proof}"),
        ("pathlib", "PosixPath", "{proof}"),
    ],
)
def test_hostile_metadata_runs_nothing(
    saved: Path, tmp_path: Path, module: str, name: str, argument: str
) -> None:
    proof = tmp_path / "proof"
    plant(saved, call(module, name, argument.format(proof=proof)))
    tensors = model(blank=True)
    with pytest.raises(CheckpointError, match=f"names {module}.{name}, which is not part of DCP"):
        load_tensors(saved, tensors)
    assert not proof.exists() and untouched(tensors)


class Reduces:
    """Pickled as the call of a function, at whatever depth it lies."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def attack(kind: str, proof: Path) -> Any:
    """An object whose unpickling makes the file `proof`."""
    if kind == "reduce":
        return Reduces(os.mkdir, (str(proof),))
    if kind == "getattr":
        return Reduces(getattr, (Reduces(importlib.import_module, ("os",)), "mkdir"))
    if kind == "partial":
        return functools.partial(os.mkdir, str(proof))
    if kind == "rebuild":
        return Reduces(torch._utils._rebuild_tensor_v2, (Reduces(os.mkdir, (str(proof),)),))
    if kind == "factory":
        return Reduces(collections.defaultdict, (os.mkdir,), None, None, iter([(str(proof), 1)]))
    if kind == "state":
        # The three-argument form: the state goes to __setstate__ of what the call returned.
        return Reduces(collections.OrderedDict, (), {"x": Reduces(os.mkdir, (str(proof),))})
    assert kind == "tensor", kind
    return torch.ones(2)


@pytest.mark.parametrize("place", ["root", "planner_data", "chunk", "key", "size"])
@pytest.mark.parametrize(
    "kind", ["reduce", "getattr", "partial", "rebuild", "factory", "state", "tensor"]
)
def test_hostile_objects_run_nothing_wherever_they_lie(
    saved: Path, tmp_path: Path, kind: str, place: str
) -> None:
    proof = tmp_path / "proof"
    hostile = attack(kind, proof)
    sizes = {name: entry.size for name, entry in read_record(saved).files.items()}
    metadata: Any = read_metadata(saved, sizes)
    tensor = metadata.state_dict_metadata["a.weight"]
    if place == "root":
        metadata = hostile
    elif place == "planner_data":
        metadata.planner_data = [{"a": (1, hostile)}]
    elif place == "chunk":
        tensor.chunks.append(hostile)
    elif place == "key":
        metadata.storage_data = {"a": [[hostile]]}
    else:
        tensor.size = hostile
    protocols = (0, 2, 5) if kind != "factory" else (5,)  # an iterator is used up by one
    for protocol in protocols:
        plant(saved, pickle.dumps(metadata, protocol))
        tensors = model(blank=True)
        with pytest.raises(CheckpointError, match="which is not part of DCP's metadata|is damaged"):
            load_tensors(saved, tensors)
        assert not proof.exists() and untouched(tensors)


def test_the_hostile_pickle_does_harm_elsewhere(tmp_path: Path) -> None:
    """Or the test above would show nothing."""
    pickle.loads(call("os", "mkdir", str(tmp_path / "proof")))
    assert (tmp_path / "proof").is_dir()


def test_a_dotted_name_does_not_walk_into_torch(saved: Path) -> None:
    """Protocol 4 resolves `float32.__class__` step by step in the stock unpickler."""
    content = b"\x80\x04\x8c\x05torch\x8c\x11float32.__class__\x93."
    plant(saved, content)
    with pytest.raises(CheckpointError, match="names torch.float32.__class__"):
        load_tensors(saved, model(blank=True))


class Victim:
    version: str | None = None


def set_on_class(module: str, name: str) -> bytes:
    """Return a pickle whose BUILD, with slot state, sets an attribute on the class itself."""
    return f"c{module}\n{name}\n(N(dS'version'\nS'bad'\nstb.".encode()


def test_a_pickle_cannot_change_dcp_classes(saved: Path) -> None:
    pickle.loads(set_on_class(Victim.__module__, "Victim"))
    assert Victim.version == "bad", "the pickle does harm elsewhere"
    plant(saved, set_on_class("torch.distributed.checkpoint.metadata", "Metadata"))
    with pytest.raises(CheckpointError, match="is damaged"):
        load_tensors(saved, model(blank=True))
    assert Metadata.version is None


def test_pickled_objects_inside_shards_are_refused(saved: Path) -> None:
    content = pickle.dumps(Metadata({"a.weight": BytesStorageMetadata()}, storage_data={}))
    plant(saved, content)
    with pytest.raises(CheckpointError, match="BytesStorageMetadata, which is not part"):
        load_tensors(saved, model(blank=True))


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"garbage", pickle.dumps({}), b"\x80\x04N."])
def test_damaged_metadata_is_refused(saved: Path, content: bytes) -> None:
    plant(saved, content)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged"):
        load_tensors(saved, model(blank=True))
