"""Hugging Face models through our checkpoints and back: logits, bits, files; no downloads."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megafp8.checkpoint import find_checkpoint, read_record
from megafp8.config import load_config
from megafp8.convert.hf_fields import KEPT, NEUTRAL
from tests.convert.converted import LENGTH, VOCAB, all_logits, run_convert, tokens
from tests.support.oracles import need
from tests.support.ranks import Ranks

need("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
    "layer_norm_epsilon": 1e-4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # Heads of another size than hidden / heads, all of Llama's biases, llama3 scaling.
    "llama": (
        "Llama",
        LLAMA
        | {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": SCALING},
    ),
    # Llama 2: as many key and value heads as queries, no scaling.
    "llama2": ("Llama", LLAMA | {"num_key_value_heads": 4}),
    "llama_tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "rope_parameters": SCALING}),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 8}),
    "gpt2": ("GPT2", GPT2),
    "gpt2_untied": (
        "GPT2",
        GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 48},
    ),
}
# Heads that two ranks cannot share.
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_odd": (
        "Mistral",
        LLAMA
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
        | {"sliding_window": None},
    ),
    "qwen2_window": (
        "Qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    ),
    "qwen3_bias": (
        "Qwen3",
        LLAMA | {"head_dim": 6, "num_key_value_heads": 1, "attention_bias": True},
    ),
}
TIED = ("llama_tied", "qwen3", "gpt2")
CLASSES = {"GPT2": ("GPT2Config", "GPT2LMHeadModel")}


@dataclass
class Converted:
    hf: Path
    ours: Path
    back: Path
    logits: Tensor
    weights: dict[str, Tensor]
    lines: list[str]


def build(family: str, settings: dict[str, Any]) -> Any:
    config_class, model_class = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    settings = {**settings, "attn_implementation": "eager"}
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1.0 + noise if norm else noise)
    return model.eval()


def forward(model: Any) -> Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(tokens()).logits


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Converted]:
    root, found = tmp_path_factory.mktemp("hf"), {}
    for kind, (family, settings) in (KINDS | ODD).items():
        hf, ours, back = (root / f"{kind}.{step}" for step in ("hf", "ours", "back"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build(family, settings)
            model.save_pretrained(hf, max_shard_size="20KB")
        (hf / "generation_config.json").write_text('{"do_sample": true}\n')
        lines = run_convert("hf", "megafp8", hf, ours)
        run_convert("megafp8", "hf", ours, back, max_shard_size="20KB")
        found[kind] = Converted(hf, ours, back, forward(model), weights_of(hf), lines)
    return found


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_logits_are_the_model_s(
    ranks: Ranks, converted: dict[str, Converted], tp: int, pp: int
) -> None:
    split = tp * pp > 1
    converted = {kind: item for kind, item in converted.items() if not (split and kind in ODD)}
    folders = {kind: str(item.ours) for kind, item in converted.items()}
    results = ranks.run(all_logits, world_size=tp * pp, folders=folders, tp=tp, pp=pp)
    for kind, item in converted.items():
        (found,) = [result[kind] for result in results if result[kind] is not None]
        assert item.logits.std() > 0.5, kind
        assert (found - item.logits).abs().max() < 1e-4, kind


def test_weights_come_back_bit_equal(converted: dict[str, Converted]) -> None:
    for kind, item in converted.items():
        back = weights_of(item.back)
        assert back.keys() == item.weights.keys(), kind
        for name, value in item.weights.items():
            assert back[name].dtype == value.dtype and torch.equal(back[name], value), (kind, name)


def test_exported_folders_load_by_their_class(converted: dict[str, Converted]) -> None:
    for kind, item in converted.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                item.back, attn_implementation="eager"
            ).eval()
        assert torch.equal(forward(model), item.logits), kind
        assert (item.back / "generation_config.json").read_text() == '{"do_sample": true}\n'


# Fields that transformers writes and which say nothing, or what other fields say already.
NOT_WRITTEN = {"transformers_version", "pretraining_tp", "layer_types", "max_window_layers"}


def test_what_is_left_out_is_said(converted: dict[str, Converted]) -> None:
    for item in converted.values():
        (note,) = [line for line in item.lines if line.startswith("note: ")]
        assert "no optimizer state: pretrain_gpt.py --config" in note and "--finetune" in note
        assert str(item.ours / "config.yaml") in note


def test_fields_come_back_equal(converted: dict[str, Converted]) -> None:
    for kind, item in converted.items():
        before, after = (
            json.loads((folder / "config.json").read_text()) for folder in (item.hf, item.back)
        )
        assert {"head_dim", "n_head"} & before.keys() or kind.startswith("qwen2")
        for name in before.keys() - NOT_WRITTEN - NEUTRAL:
            default = before[name] in (None, False) or name == "scale_attn_weights"
            assert after.get(name) == before[name] or (name not in after and default), (kind, name)
        for name in KEPT:
            assert after.get(name) == before.get(name), (kind, name)


def test_an_index_names_each_tensor_once(converted: dict[str, Converted]) -> None:
    for kind, item in converted.items():
        index = json.loads((item.back / "model.safetensors.index.json").read_text())
        weights = weights_of(item.back)
        assert index["weight_map"].keys() == weights.keys()
        total = sum(value.nbytes for value in weights.values())
        assert index["metadata"]["total_size"] == total
        for name, file in index["weight_map"].items():
            assert load_file(item.back / file)[name].numel() > 0, (kind, name)
        assert ("lm_head.weight" not in weights) == (kind in TIED)


def test_config_yaml_starts_a_run(converted: dict[str, Converted]) -> None:
    for item in converted.values():
        config = load_config(["--config", str(item.ours / "config.yaml"), "--mock-data"])
        assert config.checkpoint.load == str(item.ours) and config.checkpoint.finetune
        checkpoint = find_checkpoint(item.ours)
        assert checkpoint is not None
        record = read_record(checkpoint)
        assert record.config["model"] == config.model_dump(mode="json")["model"]
        assert record.state["vocab_size"] == VOCAB


def test_checksum_is_the_same_in_every_format(
    converted: dict[str, Converted], tmp_path: Path
) -> None:
    item = converted["llama"]
    lines = run_convert("megafp8", "hf", item.ours, tmp_path / "again")
    assert lines[-1] == item.lines[-1]
    assert "checksum" in lines[-1]


def test_bf16_is_kept_and_can_be_asked_for(converted: dict[str, Converted], tmp_path: Path) -> None:
    item = converted["llama"]
    run_convert("hf", "hf", item.hf, tmp_path / "bf16", dtype="bf16")
    half = weights_of(tmp_path / "bf16")
    assert all(torch.equal(half[k], v.bfloat16()) for k, v in item.weights.items())
    run_convert("hf", "megafp8", tmp_path / "bf16", tmp_path / "ours")
    config = load_config(["--config", str(tmp_path / "ours/config.yaml"), "--mock-data"])
    assert config.precision.bf16
    run_convert("megafp8", "hf", tmp_path / "ours", tmp_path / "back")
    back = weights_of(tmp_path / "back")
    assert back.keys() == half.keys()
    assert all(v.dtype == torch.bfloat16 and torch.equal(v, half[k]) for k, v in back.items())


def test_gpt2_names_without_prefix_and_with_buffers(
    converted: dict[str, Converted], tmp_path: Path
) -> None:
    item, bare = converted["gpt2"], tmp_path / "bare"
    bare.mkdir()
    weights = {k.removeprefix("transformer."): v for k, v in item.weights.items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH)
    (bare / "config.json").write_text((item.hf / "config.json").read_text())
    weights["h.1.attn.masked_bias"] = torch.tensor(-1, dtype=torch.int64)  # of any dtype
    save_file(weights, bare / "model.safetensors")
    lines = run_convert("hf", "megafp8", bare, tmp_path / "ours")
    assert lines[-1] == item.lines[-1]
    assert lines[0] == (
        "note: 2 constants are left out, no weights: h.0.attn.bias, h.1.attn.masked_bias"
    )
