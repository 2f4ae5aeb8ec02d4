"""Megatron's checkpoints by hand: both specs' names, what is left out, settings; no Megatron."""

import io
import random
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megafp8.checkpoint.metadata import read_metadata
from megafp8.checkpoint.reader import ShardReader
from megafp8.convert.dcp_writer import write_dcp
from megafp8.convert.items import as_they_are
from megafp8.convert.megatron import DistTensors
from megafp8.errors import CheckpointError
from tests.convert.converted import run_convert
from tests.convert.hand_made import make_folder, weights

ATTENTION = "decoder.layers.self_attention.linear_qkv"
EXTRA = f"{ATTENTION}._extra_state/shard_0_2"
# The names of the norms in the spec of TransformerEngine, and in the local one.
LOCAL = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    run_convert("hf", "megatron", make_folder(root / "hf"), root / "out")
    return root / "out" / "release"


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors as they lie in a `torch_dist` folder, layers stacked."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    tensors = ShardReader(folder, read_metadata(folder, sizes, foreign=True))
    names = tensors.metadata.state_dict_metadata
    return {name: tensors.read(name) for name in names if "_extra_state" not in name}


def local(name: str) -> str:
    for theirs, ours in LOCAL.items():
        name = name.replace(theirs, ours)
    return name


def by_layer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, value in tensors.items():
        rest = name.removeprefix("decoder.layers.")
        if rest == name:
            found[name] = value
            continue
        found |= {f"decoder.layers.{i}.{rest}": part.clone() for i, part in enumerate(value)}
    return found


def write(
    folder: Path, release: Path, tensors: Mapping[str, Tensor], objects: Mapping[str, bytes]
) -> Path:
    folder.mkdir()
    for name in ("common.pt", "metadata.json"):
        shutil.copy(release / name, folder)
    write_dcp(folder, as_they_are(tensors), lambda count: None, objects=objects)
    return folder


def check_weights(folder: Path, out: Path) -> list[str]:
    lines = run_convert("megatron", "hf", folder, out)
    back, source = load_file(out / "model.safetensors"), weights()
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], source[name]) for name in source)
    return [line for line in lines if line.startswith("note: ")]


@pytest.mark.parametrize("rename", [str, local], ids=["te", "local"])
@pytest.mark.parametrize("layered", [False, True], ids=["stacked", "by layer"])
def test_names_of_both_specs(
    release: Path, tmp_path: Path, rename: Callable[[str], str], layered: bool
) -> None:
    tensors = stored(release)
    assert any(".layer_norm_weight" in name for name in tensors)
    tensors = by_layer(tensors) if layered else tensors
    tensors = {rename(name): value for name, value in tensors.items()}
    assert any("input_layernorm" in name for name in tensors) == (rename is local)
    folder = write(tmp_path / "in", release, tensors, {})
    assert check_weights(folder, tmp_path / "out") == []


def test_a_norm_under_both_names_is_refused(release: Path, tmp_path: Path) -> None:
    tensors = stored(release)
    tensors |= {local(name): value for name, value in tensors.items()}
    folder = write(tmp_path / "in", release, tensors, {})
    with pytest.raises(CheckpointError, match="are both decoder.layers.0.input_layernorm.weight"):
        run_convert("megatron", "hf", folder, tmp_path / "out")


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ([None], True),
        ([torch.empty(0, dtype=torch.uint8)], True),
        ([torch.arange(40, dtype=torch.uint8)], False),
        ([io.BytesIO(b"scale_fwd")], False),
        ([Namespace(scale_fwd=448.0)], False),
    ],
)
def test_fp8_state_of_transformer_engine_is_named(
    release: Path, tmp_path: Path, state: Any, kept: bool
) -> None:
    folder = write(tmp_path / "in", release, stored(release), {EXTRA: saved(state)})
    notes = check_weights(folder, tmp_path / "out")
    wanted = "note: FP8 state of TransformerEngine is not converted, scales start anew: left out "
    assert notes == ([] if kept else [wanted + EXTRA])


def test_optimizer_state_is_named(release: Path, tmp_path: Path) -> None:
    tensors = stored(release)
    moments = {
        f"optimizer.state.{kind}.{name}": torch.zeros_like(value)
        for name, value in tensors.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    folder = write(tmp_path / "in", release, tensors | moments, {})
    (note,) = check_weights(folder, tmp_path / "out")
    assert note.startswith("note: optimizer state is not converted: left out optimizer.state.exp_")
    assert f"and {len(moments) - 3} more" in note
    run_convert("megatron", "megafp8", folder, tmp_path / "ours")


@pytest.mark.parametrize("name", ["common.pt", "__0_0.distcp", ".metadata", "metadata.json"])
def test_damage_is_one_line_with_the_file(release: Path, tmp_path: Path, name: str) -> None:
    """There are no checksums in Megatron's files: a flipped bit may pass, but ends no other way."""
    folder, chance = tmp_path / "in", random.Random(3)
    shutil.copytree(release, folder)
    content, refused = (release / name).read_bytes(), 0
    for attempt in range(12):
        damaged = bytearray(content)
        # Most of them where it hurts: at the start of the file.
        damaged[chance.randrange(min(len(damaged), 2000))] ^= 1 << chance.randrange(8)
        (folder / name).write_bytes(damaged if attempt else content[: len(content) // 2])
        try:
            run_convert("megatron", "hf", folder, tmp_path / str(attempt))
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and "weights_only" not in str(error)
            assert not (tmp_path / str(attempt)).exists()
    assert refused > 0


@pytest.mark.parametrize("rename", [str, local], ids=["te", "local"])
def test_one_pickled_file(release: Path, tmp_path: Path, rename: Callable[[str], str]) -> None:
    common = torch.load(release / "common.pt", weights_only=False)
    model: dict[str, Any] = {rename(n): v for n, v in by_layer(stored(release)).items()}
    fc1 = "decoder.layers.1.mlp.linear_fc1._extra_state"
    model |= {
        "decoder.layers.0.self_attention.linear_qkv._extra_state": None,
        "decoder.layers.0.mlp.linear_fc1._extra_state": torch.empty(0, dtype=torch.uint8),
        fc1: io.BytesIO(b"amax_history_fwd"),
    }
    folder = tmp_path / "in"
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    state = {"args": common["args"], "iteration": 7, "model": model, "optimizer": {"param": 1}}
    for version, words in (({}, "is missing"), ({"checkpoint_version": 1.0}, "is 1.0")):
        torch.save(state | version, path)
        with pytest.raises(CheckpointError, match=f"checkpoint_version {words}; allowed: 2.0, 3.0"):
            run_convert("megatron", "hf", folder, tmp_path / "out")
    torch.save(state | {"checkpoint_version": 3.0}, path)
    (path.parent / "distrib_optim.pt").write_bytes(b"x")
    notes = check_weights(folder, tmp_path / "out")
    assert notes == [
        "note: optimizer state is not converted: left out mp_rank_00/distrib_optim.pt, "
        "mp_rank_00/model_optim_rng.pt",
        f"note: FP8 state of TransformerEngine is not converted, scales start anew: left out {fc1}",
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor(1.0), r"has shape \[\], expected"),
        ([1.0], "linear_qkv.weight is not Megatron-core's"),
    ],
    ids=["scalar", "list"],
)
def test_a_pickled_value_that_is_no_weight(
    release: Path, tmp_path: Path, value: Any, words: str
) -> None:
    common = torch.load(release / "common.pt", weights_only=False)
    model: dict[str, Any] = {local(n): v for n, v in by_layer(stored(release)).items()}
    model["decoder.layers.0.self_attention.linear_qkv.weight"] = value
    path = tmp_path / "in" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({"args": common["args"], "checkpoint_version": 3.0, "model": model}, path)
    with pytest.raises(CheckpointError, match=words):
        run_convert("megatron", "hf", tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickled_parameter_is_its_values(release: Path, tmp_path: Path) -> None:
    """A file of a module's parameters, which ask for gradients, converts like one of tensors."""
    common = torch.load(release / "common.pt", weights_only=False)
    model = {local(n): torch.nn.Parameter(v) for n, v in by_layer(stored(release)).items()}
    path = tmp_path / "in" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save({"args": common["args"], "checkpoint_version": 3.0, "model": model}, path)
    assert check_weights(tmp_path / "in", tmp_path / "out") == []
    run_convert("megatron", "megafp8", tmp_path / "in", tmp_path / "ours")


def test_pickled_files_of_interleaved_stages(tmp_path: Path) -> None:
    """pp 2 with two chunks each: a rank holds layers 0 and 2, or 1 and 3, numbered from 0."""
    tensors = weights()
    for layer in (2, 3):
        for name in [name for name in tensors if ".layers.0." in name]:
            new = name.replace(".layers.0.", f".layers.{layer}.")
            tensors[new] = torch.full_like(tensors[name], 0.25 * layer)
    run_convert(
        "hf", "megatron", make_folder(tmp_path / "hf", tensors, num_hidden_layers=4), tmp_path / "m"
    )
    release = tmp_path / "m" / "release"
    args = vars(torch.load(release / "common.pt", weights_only=False)["args"])
    args |= {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    whole = by_layer(stored(release))
    for stage in range(2):
        chunks: list[dict[str, Tensor]] = [{}, {}]
        for name, value in whole.items():
            layer = re.match(r"decoder\.layers\.(\d+)\.", name)
            if layer is None:
                first = name.startswith("embedding.")
                if (stage, first) in ((0, True), (1, False)):
                    chunks[0 if first else 1][name] = value
            elif int(layer.group(1)) % 2 == stage:
                chunk = int(layer.group(1)) // 2
                chunks[chunk][name.replace(layer.group(0), "decoder.layers.0.")] = value
        path = tmp_path / "in" / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        state = {"checkpoint_version": 3.0, "args": Namespace(**args)}
        state |= {"model0": chunks[0], "model1": chunks[1]}
        torch.save(state, path)
    run_convert("megatron", "hf", tmp_path / "in", tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("window_size", 5, "two numbers, the second 0 or -1"),
        ("window_size", (7, 3), "two numbers, the second 0 or -1"),
        ("window_size", (7,), "two numbers"),
        ("rope_type", "yarn", "None or rope"),
        ("hybrid_override_pattern", "M-M*", "None"),
        ("softmax_type", "learnable", "None or vanilla"),
        ("num_experts", 8, "None or 0"),
        ("num_experts", torch.zeros(2), "None or 0"),
    ],
)
def test_settings_that_mean_something_else(
    release: Path, tmp_path: Path, name: str, value: Any, allowed: str
) -> None:
    folder = tmp_path / "in"
    shutil.copytree(release, folder)
    common = torch.load(release / "common.pt", weights_only=False)
    torch.save({"args": Namespace(**{**vars(common["args"]), name: value})}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=f"args.{name} is .*; allowed: {allowed}"):
        run_convert("megatron", "hf", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["norm_epsilon", "rotary_base", "rotary_percent"])
def test_zero_is_no_missing_setting(release: Path, tmp_path: Path, name: str) -> None:
    """It is refused as what it is, and nothing computes with a default instead."""
    folder = tmp_path / "in"
    shutil.copytree(release, folder)
    common = torch.load(release / "common.pt", weights_only=False)
    torch.save({"args": Namespace(**{**vars(common["args"]), name: 0.0})}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=rf"model.{name}: found 0.0, allowed > 0"):
        run_convert("megatron", "hf", folder, tmp_path / "out")


def test_a_configuration_and_what_it_would_override(release: Path, tmp_path: Path) -> None:
    """Nothing that was given is dropped: neither by --config nor from the stored settings."""
    out, config = tmp_path / "out", tmp_path / "model.yaml"
    for name in ("seq_length", "make_vocab_size_divisible_by"):
        flag = f"--{name.replace('_', '-')} 32"
        with pytest.raises(CheckpointError, match=f"{flag}: --config .*; give {name} there"):
            run_convert("megatron", "hf", release, out, config=config, **{name: 32})
    with pytest.raises(CheckpointError, match="--config .*: .*common.pt holds the model's args"):
        run_convert("megatron", "hf", release, out, config=config)
    assert not out.exists()


def test_entries_are_ours_whatever_the_spec(release: Path) -> None:
    names = DistTensors(release).entries
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names
    assert not any("layer_norm_" in name for name in names)
