"""Megatron's settings (`args` in its checkpoints) as our section `model`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megafp8.config import ModelShape
from megafp8.config.model import ModelConfig
from megafp8.errors import CheckpointError

# Settings, and the values that mean what we compute. Anything else is refused: the weights alone do
# not tell.
_EXPECTED: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((None, 0), "num_experts mtp_num_layers glu_linear_offset"),
    (
        (None, False),
        "multi_latent_attention apply_layernorm_1p layernorm_zero_centered_gamma squared_relu "
        "apply_residual_connection_post_layernorm quick_geglu qk_l2_norm attention_output_gate "
        "rotary_interleaved is_hybrid_model",
    ),
    (
        (None,),
        "no_rope_freq experimental_attention_variant heterogeneous_layers_config_path "
        "window_attn_skip_freq encoder_num_layers_is_moe decoder_num_layers mrope_section "
        "softmax_scale activation_func_clamp_value hybrid_override_pattern hybrid_layer_pattern",
    ),
    ((None, 1), "rotary_seq_len_interpolation_factor"),
    ((None, True), "add_position_embedding"),
    ((None, "vanilla"), "softmax_type"),
    ((None, "rope"), "rope_type"),
)
_SWITCHES = (
    "add_qkv_bias bias_gelu_fusion group_query_attention openai_gelu qk_layernorm swiglu "
    "untie_embeddings_and_output_weights use_rope_scaling"
)
_TAKEN = (
    "num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels seq_length "
    "max_position_embeddings normalization"
)
# What a model's settings are written as, in order; `to_args` says those of other names with us.
_WRITTEN = (
    "num_layers encoder_num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels "
    "group_query_attention num_query_groups seq_length max_position_embeddings "
    "position_embedding_type add_position_embedding rotary_base rotary_percent use_rope_scaling "
    "rope_scaling_factor normalization norm_epsilon swiglu openai_gelu squared_relu "
    "bias_gelu_fusion add_bias_linear add_qkv_bias qk_layernorm window_size "
    "untie_embeddings_and_output_weights make_vocab_size_divisible_by vocab_size "
    "padded_vocab_size hidden_dropout attention_dropout apply_layernorm_1p num_experts "
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "bf16 fp16 params_dtype use_mcore_models ckpt_format iteration consumed_train_samples "
    "consumed_valid_samples"
)
# Constants of Megatron's rope scaling; only the factor is a setting there.
_ROPE_CONSTANTS = {
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_max_position_embeddings": 8192,
}


def from_args(
    path: Path, args: Mapping[str, Any], seq_length: int | None, divisible_by: int
) -> dict[str, Any]:
    """Translate Megatron's settings.

    Args:
        path: for messages.
        args: the stored settings.
        seq_length: another context than the stored one.
        divisible_by: padding of our vocabulary.

    Raises:
        CheckpointError: a setting is missing, or means something that is not built.
    """
    missing = [name for name in _TAKEN.split() if args.get(name) is None]
    if missing:
        raise CheckpointError(f"{path}: args lack {', '.join(missing)}; give --config FILE.yaml")
    _check_values(path, args)
    positions = args.get("position_embedding_type", "learned_absolute")
    if args.get("use_rotary_position_embeddings") and positions != "rope":
        raise CheckpointError(
            f"{path}: args.use_rotary_position_embeddings is True, and position_embedding_type "
            f"is {positions!r:.40}"
        )
    bias = bool(args.get("add_bias_linear", True))
    on = {name: bool(args.get(name)) for name in _SWITCHES.split()}
    window = args.get("window_size")
    model = {name: args[name] for name in _TAKEN.split()} | {
        "group_query_attention": on["group_query_attention"],
        "swiglu": on["swiglu"],
        "qk_layernorm": on["qk_layernorm"],
        "seq_length": seq_length or args["seq_length"],
        "position_embedding_type": positions,
        "num_query_groups": args.get("num_query_groups") if on["group_query_attention"] else None,
        "rotary_base": _number(args, 10000.0, "rotary_base"),
        "rotary_percent": _number(args, 1.0, "rotary_percent"),
        "norm_epsilon": _number(args, 1e-5, "norm_epsilon", "layernorm_epsilon"),
        "untie_embeddings_and_output_weights": on["untie_embeddings_and_output_weights"],
        "disable_bias_linear": not bias,
        "add_qkv_bias": bias or on["add_qkv_bias"],
        "window_size": None if window is None or window[0] < 0 else (window[0], 0),
        "make_vocab_size_divisible_by": divisible_by,
        "hidden_dropout": _number(args, 0.0, "hidden_dropout"),
        "attention_dropout": _number(args, 0.0, "attention_dropout"),
    }
    if on["use_rope_scaling"]:
        factor = _number(args, 8.0, "rope_scaling_factor")
        model |= {"use_rope_scaling": True, "rope_scaling_factor": factor, **_ROPE_CONSTANTS}
    if not on["swiglu"]:
        # Megatron's fused bias and GELU is the tanh form; the unfused one is exact.
        tanh = on["openai_gelu"] or (bias and on["bias_gelu_fusion"])
        model["activation"] = "gelu-tanh" if tanh else "gelu"
    return model


def _number(args: Mapping[str, Any], default: float, *names: str) -> Any:
    """The first of these settings that is there; zero is a value, and no missing one."""
    return next((args[name] for name in names if args.get(name) is not None), default)


def _check_values(path: Path, args: Mapping[str, Any]) -> None:
    """Refuse settings that mean what is not built, by name."""

    def check(name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise CheckpointError(f"{path}: args.{name} is {args[name]!r:.60}; allowed: {allowed}")

    for allowed, names in _EXPECTED:
        for name in names.split():
            value = args.get(name)
            # A tensor has no one answer to whether it equals these.
            plain = not isinstance(value, torch.Tensor) and value in allowed
            check(name, plain, " or ".join(map(str, allowed)))
    window = args.get("window_size")
    pair = isinstance(window, (tuple, list)) and [type(n) for n in window] == [int, int]
    sees_back = window is None or (pair and window[1] in (0, -1))
    check("window_size", sees_back, "two numbers, the second 0 or -1")


def refusal(model: ModelConfig) -> str | None:
    """Why Megatron cannot compute this model; None if it can."""
    biases = (model.qkv_bias, model.attention_output_bias, model.mlp_bias)
    if biases not in ((True, True, True), (False, False, False), (True, False, False)):
        return f"Megatron has biases in all linears, none, or linear_qkv alone; found {biases}"
    if model.use_rope_scaling:
        for name, value in _ROPE_CONSTANTS.items():
            if getattr(model, name) != value:
                return f"Megatron's rope scaling has {name} {value}, found {getattr(model, name)}"
    return None


def to_args(model: ModelConfig, shape: ModelShape, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's settings of a model, as its `--use-checkpoint-args` reads them."""
    assert refusal(model) is None
    values: dict[str, Any] = {
        "encoder_num_layers": model.num_layers,
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_dim,
        "num_query_groups": model.query_groups if model.group_query_attention else 1,
        "max_position_embeddings": model.positions,
        "add_position_embedding": True,
        "bias_gelu_fusion": model.activation == "gelu-tanh",
        "add_bias_linear": model.attention_output_bias,
        "add_qkv_bias": model.qkv_bias and not model.attention_output_bias,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.padded_vocab_size,
        "num_experts": None,
        "virtual_pipeline_model_parallel_size": None,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "use_mcore_models": True,
        "ckpt_format": "torch_dist",
    }
    values |= dict.fromkeys(("openai_gelu", "squared_relu", "apply_layernorm_1p"), False)
    values |= dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1)
    values |= dict.fromkeys(("iteration", "consumed_train_samples", "consumed_valid_samples"), 0)
    names = _WRITTEN.split()
    return {name: values[name] if name in values else getattr(model, name) for name in names}
