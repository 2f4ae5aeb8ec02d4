"""FP8 folders: names, factors and values, decoded here by hand."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megafp8.checkpoint.reader import TensorReader
from megafp8.convert.items import Target
from megafp8.convert.native import open_native, write_native
from megafp8.errors import CheckpointError
from tests.checkpoint.made import make_source
from tests.convert.converted import run_convert
from tests.convert.hand_made import CONFIG, make_folder, weights

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def decoded(codes: Tensor, factor: Tensor) -> Tensor:
    assert codes.dtype == torch.float8_e4m3fn and factor.dtype == torch.float32
    return codes.float() * factor


def close(found: Tensor, wanted: Tensor, factor: Tensor) -> None:
    """E4M3 has 3 bits of mantissa; below 2^-6 its steps are 2^-9."""
    bound = torch.maximum(wanted.abs() / 16, factor * 2.0**-10) * (1 + 1e-5)
    assert ((found - wanted).abs() <= bound).all()
    assert not torch.equal(found, wanted)


def is_linear(name: str) -> bool:
    return name.removesuffix(".weight").endswith(LINEARS)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint of ours with scale state for all linears but those of layer 0's attention."""
    run_convert("hf", "megafp8", make_folder(tmp_path / "in"), tmp_path / "plain")
    view = open_native(tmp_path / "plain")
    scales: dict[str, Tensor] = {}
    for spec in view.shape.parameters():
        module = spec.name.removesuffix(".weight")
        if spec.kind == "linear" and module != "decoder.layers.0.self_attention.linear_qkv":
            # A power of two that wastes some range; one too large, which would saturate.
            value = 1e9 if module.endswith("1.mlp.linear_fc2") else 512.0
            scales[f"fp8.{module}.weight.scale"] = torch.tensor(value)
            scales[f"fp8.{module}.input.scale"] = torch.tensor(16.0 + (spec.layer or 0))
            scales[f"fp8.{module}.input.amax_history"] = torch.arange(4.0)
    view = dataclasses.replace(view, scales=scales)
    target = tmp_path / "ours"
    target.mkdir()
    write_native(Target(view, target, target, torch.float32, True))
    return target


def test_dynamic(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    lines = run_convert("hf", "hf", folder, tmp_path / "wide", fp8="dynamic", dtype="fp32")
    assert any("what is not FP8 is float32" in line for line in lines)
    lines = run_convert("hf", "hf", folder, tmp_path / "out", fp8="dynamic", dtype="bf16")
    assert not any("float32" in line for line in lines)
    assert lines[-1].startswith("verified: 14 FP8 weights decode to the source")
    found, source = load_file(tmp_path / "out/model.safetensors"), weights()
    assert found.keys() == source.keys() | {f"{n}_scale" for n in source if is_linear(n)}
    for name, value in source.items():
        if is_linear(name):
            factor = found[f"{name}_scale"]
            assert factor.shape == ()
            close(decoded(found[name], factor), value, factor)
        else:
            assert torch.equal(found[name], value.bfloat16())
    q, k, v = (found[f"model.layers.0.self_attn.{p}_proj.weight_scale"] for p in "qkv")
    assert q == k == v  # one tensor of ours, so that engines fuse them without a change
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "ignored_layers": ["lm_head"],
        "modules_to_not_convert": ["lm_head"],
    }


def test_blockwise(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    run_convert("hf", "hf", folder, tmp_path / "out", fp8="blockwise", max_shard_size="100kB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    found = {
        name: value
        for file in set(index["weight_map"].values())
        for name, value in load_file(tmp_path / "out" / file).items()
    }
    assert found.keys() == index["weight_map"].keys()
    for name, value in weights().items():
        if not is_linear(name):
            continue
        factors = found[f"{name}_scale_inv"]
        rows, columns = value.shape
        assert factors.shape == (-(-rows // 128), -(-columns // 128))
        for i in range(factors.shape[0]):
            for j in range(factors.shape[1]):
                area = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                close(decoded(found[name][area], factors[i, j]), value[area], factors[i, j])
                # Each block uses the whole range of its format.
                assert found[name][area].float().abs().max() == 448
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128] and config["activation_scheme"] == "dynamic"


def test_a_block_of_zeros_has_the_factor_one(tmp_path: Path) -> None:
    tensors, name = weights(), "model.layers.0.mlp.up_proj.weight"
    tensors[name][:128, :128] = 0
    folder = make_folder(tmp_path / "in", tensors)
    run_convert("hf", "hf", folder, tmp_path / "out", fp8="blockwise")
    found = load_file(tmp_path / "out/model.safetensors")
    factors = found[f"{name}_scale_inv"]
    assert factors[0, 0] == 1 and not found[name][:128, :128].float().any()
    edge = tensors[name][:128, 128:]
    assert edge.shape[1] < 128
    assert torch.isclose(factors[0, 1], edge.abs().max() / 448, rtol=1e-6)


def test_static_takes_the_checkpoint_s_scales(trained: Path, tmp_path: Path) -> None:
    run_convert("megafp8", "hf", trained, tmp_path / "out", fp8="static")
    found, source = load_file(tmp_path / "out/model.safetensors"), weights()
    for name, value in source.items():
        module = name.removesuffix(".weight")
        layer = 1 if ".layers.1." in name else 0
        if not is_linear(name) or (layer == 0 and module.endswith(("q_proj", "k_proj", "v_proj"))):
            assert torch.equal(found[name], value)
            assert f"{module}.input_scale" not in found
            continue
        factor = found[f"{module}.weight_scale"]
        if module.endswith("1.mlp.down_proj"):
            # The stored one would saturate.
            assert torch.isclose(factor, value.abs().max() / 448, rtol=1e-6)
        else:
            assert factor == 1 / 512.0
        assert found[f"{module}.input_scale"] == 1 / torch.tensor(16.0 + layer)
        close(decoded(found[name], factor), value, factor)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["activation_scheme"] == "static"
    assert config["ignored_layers"] == [
        "lm_head",
        *(f"model.layers.0.self_attn.{part}_proj" for part in "qkv"),
    ]


def test_scales_beside_the_weights(trained: Path, tmp_path: Path) -> None:
    run_convert("megafp8", "hf", trained, tmp_path / "out", fp8="scales")
    found = load_file(tmp_path / "out/fp8_scales.safetensors")
    view = open_native(trained)
    assert found.keys() == view.scales.keys()
    assert all(torch.equal(found[name], view.scales[name]) for name in found)
    plain = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(plain[name], value) for name, value in weights().items())
    # A Hugging Face folder is weights alone, and the way back says so.
    lines = run_convert("hf", "megafp8", tmp_path / "out", tmp_path / "again")
    left = "note: FP8 scale state is left out, scales start anew: fp8_scales.safetensors"
    assert left in lines


def test_what_cannot_be_fp8_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in")
    for mode, target, match in (
        ("static", "hf", "holds no FP8 scale state of inputs"),
        ("scales", "hf", "holds no FP8 scale state"),
        ("dynamic", "megafp8", "--fp8 dynamic is for --to hf"),
    ):
        with pytest.raises(CheckpointError, match=match):
            run_convert("hf", target, folder, tmp_path / "out", fp8=mode)
    run_convert("hf", "hf", folder, tmp_path / "baked", fp8="dynamic")
    with pytest.raises(CheckpointError, match="quantization_config is"):
        run_convert("hf", "megafp8", tmp_path / "baked", tmp_path / "out")
    assert not (tmp_path / "out").exists() and CONFIG["model_type"] == "llama"


def test_gpt2_has_no_fp8_layout(tmp_path: Path) -> None:
    away = dict.fromkeys(CONFIG.keys() - {"vocab_size"})
    sizes = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64}
    tensors = {"wte.weight": torch.ones(100, 8), "wpe.weight": torch.ones(64, 8)}
    for name, rows, columns in (
        ("attn.c_attn", 8, 24),
        ("attn.c_proj", 8, 8),
        ("mlp.c_fc", 8, 32),
        ("mlp.c_proj", 32, 8),
    ):
        tensors[f"h.0.{name}.weight"] = torch.ones(rows, columns)
        tensors[f"h.0.{name}.bias"] = torch.ones(columns)
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        tensors |= {f"{name}.weight": torch.ones(8), f"{name}.bias": torch.zeros(8)}
    folder = make_folder(tmp_path / "in", tensors, **{**away, **sizes})
    for mode in ("static", "dynamic", "blockwise"):
        with pytest.raises(CheckpointError, match=f"--fp8 {mode}: gpt2 has no FP8 layout; allowed"):
            run_convert("hf", "hf", folder, tmp_path / "out", fp8=mode)
    assert not (tmp_path / "out").exists()
    run_convert("hf", "hf", folder, tmp_path / "out")


def test_scales_of_each_rank_merge_on_export(tmp_path: Path) -> None:
    """`fp8_local.*` of two ranks: the smaller scale, the larger amaxes, and a line that says so."""
    source = make_source(tmp_path / "ours", tied=True)
    lines = run_convert("megafp8", "hf", source, tmp_path / "out", fp8="scales")
    reader = TensorReader.open(source)
    found = load_file(tmp_path / "out/fp8_scales.safetensors")
    own = [name for name in reader.names if name.startswith("fp8_local.")]
    assert own and len(found) == sum(
        name.startswith(("fp8.", "fp8_local.")) for name in reader.names
    )
    for name in own:
        merged = found[name.replace("fp8_local.", "fp8.", 1)]
        stored = reader.read(name)
        wanted = stored.amin((0, 1)) if name.endswith(".scale") else stored.amax((0, 1))
        assert merged.shape == wanted.shape and torch.equal(merged, wanted), name
    notes = [line for line in lines if line.startswith("note: ")]
    assert f"{len(own)} tensors merge into one for all" in " ".join(notes)
    assert "scales of the merged histories" in " ".join(notes)
    assert "optimizer state is not converted" in " ".join(notes)
    # Of a tied model of two pipeline stages: the head is neither in a file nor in the index.
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")
    # Neither is it dropped where no flag asks for it.
    lines = run_convert("megafp8", "hf", source, tmp_path / "plain")
    assert f"FP8 scale state is left out: {len(found)} tensors (--fp8 scales" in " ".join(lines)
    run_convert("megafp8", "megafp8", source, tmp_path / "again")
    again = open_native(tmp_path / "again")
    assert again.scales.keys() == found.keys()
    assert all(torch.equal(again.scales[name], value) for name, value in found.items())
