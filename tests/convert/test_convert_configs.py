"""Configurations that a conversion refuses: by the name of the field, in one line."""

from pathlib import Path
from typing import Any

import pytest

from megafp8.convert.hf_fields import read_json
from megafp8.errors import CheckpointError
from tests.convert.converted import refused, run_convert
from tests.convert.hand_made import CONFIG, make_folder

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral'; allowed: llama, mistral, qwen2"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu"),
        ({"rope_scaling": YARN}, "rope_scaling is .*yarn.*; allowed: rope_type default, or llama3"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is .*dynamic"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling is .*; allowed: no factor without"),
        ({"rope_theta": "many"}, "rope_theta is 'many'; allowed: a number"),
        ({"num_local_experts": 8}, "unknown fields .*num_local_experts = 8"),
        ({"mlp_bias": "yes"}, "mlp_bias is 'yes'; allowed: true or false"),
        ({"attention_bias": True}, "4 missing|6 missing|8 missing"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1.0"),
        ({"sliding_window": 16}, "sliding_window is 16; allowed: None"),
        ({"num_key_value_heads": 3}, "num_query_groups 3"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; allowed: a positive whole"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, but lm_head.weight differs"),
        ({"rope_scaling": {**LLAMA3, "type": "yarn"}}, "the same type and rope_type"),
        ({"rope_scaling": {**LLAMA3, "factor": True}}, "allowed: rope_type default, or llama3"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16.5}}, "allowed: rope"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "must be below"),
        ({"rope_scaling": {**LLAMA3, "rope_theta": 5.0}}, "rope_theta 10000 in it, as beside it"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is 10000.0; allowed: 5.0 as in"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; allowed: an object or null"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling is .*longrope"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 10000.0}},
            "rope_scaling is .*; allowed: the same as rope_parameters",
        ),
        ({"layer_types": [{}, {}]}, r"layer_types is \[\{\}, \{\}\]; allowed: 2 of full_attention"),
        ({"layer_types": 3}, "layer_types is 3; allowed: 2 of"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*; allowed: 2 of"),
        ({"num_hidden_layers": 10**9}, "num_layers: found 1000000000"),
        ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000.*; allowed: a positive whole"),
        ({"head_dim": 10**40}, "head_dim is 1000.*; allowed: a positive whole"),
        ({"head_dim": 5}, "head_dim is 5; allowed: heads of an even size for rope, found 5"),
        ({"head_dim": None, "hidden_size": 12}, "hidden_size is 12; allowed: heads of .*found 3"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*; allowed: a number"),
        ({"rope_scaling": LLAMA3 | {"factor": 10**400}}, "allowed: rope_type default, or llama3"),
        ({"rope_scaling": LLAMA3 | {"factor": float("inf")}}, "allowed: rope_type default, or"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters is .*; allowed: a number >= 0"),
        (
            {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
            "rope_parameters is .*; allowed: a partial_rotary_factor of 1.0",
        ),
        ({"model_type": "mistral"}, "sliding_window is missing"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            "layer_types is .*full.*; allowed: sliding_attention alone, as sliding_window is given",
        ),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["chunked"] * 2},
            "layer_types is .*chunked.*; allowed: 2 of full_attention or sliding_attention",
        ),
        ({"model_type": "mistral", "sliding_window": 8, "mlp_bias": True}, "unknown .*mlp_bias"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0},
            "sliding_window is missing",
        ),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4},
            "max_window_layers is missing",
        ),
        ({"vocab_size": 96}, "has shape .*100, 160.*, expected .*96, 160"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 1,
            },
            "max_window_layers is 1; allowed: 0, or 2 and more",
        ),
    ],
)
def test_a_config_that_is_not_supported(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    refused(make_folder(tmp_path / "in", **changes), match)


GPT2 = {
    "model_type": "gpt2",
    "n_embd": 160,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "n_inner": None,
}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"activation_function": "relu"}, "activation_function is 'relu'; allowed: gelu, gelu_new"),
        ({"n_inner": 0}, "n_inner is 0; allowed: a positive"),
        ({"n_ctx": 32}, "n_ctx is 32; allowed: 64"),
        ({"n_head": 7}, "num_attention_heads|divisible"),
        ({"embd_pdrop": 0.2}, "embd_pdrop is 0.2; allowed: 0.1 as resid_pdrop"),
        ({"n_positions": None}, "n_positions is missing"),
        ({}, r"hidden_size = 160.* give --ignore-config-field"),
    ],
)
def test_a_gpt2_that_is_not_supported(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    # Without Llama's fields, but for the last.
    away = {} if not changes else dict.fromkeys(CONFIG.keys() - {"vocab_size", "model_type"})
    refused(make_folder(tmp_path / "in", **{**away, **GPT2, **changes}), match)


def test_an_unknown_field_can_be_ignored_by_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", surprising_flag=3)
    refused(folder, "surprising_flag = 3; give --ignore-config-field")
    run_convert(
        "hf", "megafp8", folder, tmp_path / "out", ignore_config_fields=("surprising_flag",)
    )


def test_a_name_to_ignore_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", rope_interleaved=True, surprising_flag=3)
    ignored = ("rope_interleaved", "surprising_flag")
    for name, words in (
        ("surprising_flg", "config.json has no such field"),
        ("hidden_size", "the model is built from it"),
    ):
        match = f"--ignore-config-field {name}: .*{words}"
        refused(folder, match, ignore_config_fields=(*ignored, name))
    run_convert("hf", "megafp8", folder, tmp_path / "ours", ignore_config_fields=ignored)
    for source in ("megafp8", "megatron"):
        with pytest.raises(CheckpointError, match=f"is for --from hf, found --from {source}"):
            run_convert(source, "hf", tmp_path, tmp_path / "out", ignore_config_fields=ignored)


def test_a_config_of_absurd_depth_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read_json(tmp_path / "config.json")
