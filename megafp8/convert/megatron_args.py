"""Megatron's settings (`args` in its checkpoints) as our section `model`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megafp8.config import ModelShape
from megafp8.config.model import ModelConfig
from megafp8.convert.hf_fields import is_number, is_size
from megafp8.errors import CheckpointError

# Name, values that mean what we compute. Anything else is refused: the weights alone do not tell.
_EXPECTED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("num_experts", (None, 0)),
    ("multi_latent_attention", (None, False)),
    ("apply_layernorm_1p", (None, False)),
    ("layernorm_zero_centered_gamma", (None, False)),
    ("apply_residual_connection_post_layernorm", (None, False)),
    ("squared_relu", (None, False)),
    ("quick_geglu", (None, False)),
    ("qk_l2_norm", (None, False)),
    ("attention_output_gate", (None, False)),
    ("rotary_interleaved", (None, False)),
    ("rotary_seq_len_interpolation_factor", (None, 1)),
    ("no_rope_freq", (None,)),
    ("mtp_num_layers", (None, 0)),
    ("experimental_attention_variant", (None,)),
    ("heterogeneous_layers_config_path", (None,)),
    ("window_attn_skip_freq", (None,)),
    ("encoder_num_layers_is_moe", (None,)),
    ("decoder_num_layers", (None,)),
    ("softmax_type", (None, "vanilla")),
    ("add_position_embedding", (None, True)),
    ("rope_type", (None, "rope")),
    ("mrope_section", (None,)),
    ("softmax_scale", (None,)),
    ("glu_linear_offset", (None, 0)),
    ("activation_func_clamp_value", (None,)),
    ("is_hybrid_model", (None, False)),
    ("hybrid_override_pattern", (None,)),
    ("hybrid_layer_pattern", (None,)),
)
_SWITCHES = (
    "add_bias_linear",
    "add_qkv_bias",
    "bias_gelu_fusion",
    "group_query_attention",
    "openai_gelu",
    "qk_layernorm",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
    "use_rotary_position_embeddings",
)
_NUMBERS = (
    "attention_dropout",
    "hidden_dropout",
    "layernorm_epsilon",
    "norm_epsilon",
    "rope_scaling_factor",
    "rotary_base",
    "rotary_percent",
)
# Constants of Megatron's rope scaling; only the factor is a setting there.
_ROPE_CONSTANTS = {
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_original_max_position_embeddings": 8192,
}
_REQUIRED_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
)
_SIZES = (*_REQUIRED_SIZES, "num_query_groups", "vocab_size")
_TAKEN = (*_REQUIRED_SIZES, "normalization")


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
    missing = [name for name in _TAKEN if args.get(name) is None]
    if missing:
        raise CheckpointError(f"{path}: args lack {', '.join(missing)}; give --config FILE.yaml")
    for name, allowed in _EXPECTED:
        value = args.get(name)
        # A tensor has no one answer to whether it equals these.
        if isinstance(value, torch.Tensor) or value not in allowed:
            shown = " or ".join(str(value) for value in allowed)
            raise CheckpointError(f"{path}: args.{name} is {value!r:.60}; allowed: {shown}")
    _check_types(path, args)
    positions = args.get("position_embedding_type", "learned_absolute")
    if args.get("use_rotary_position_embeddings") and positions != "rope":
        raise CheckpointError(
            f"{path}: args.use_rotary_position_embeddings is True, and position_embedding_type "
            f"is {positions!r:.40}"
        )
    bias = bool(args.get("add_bias_linear", True))
    grouped = bool(args.get("group_query_attention"))
    swiglu = bool(args.get("swiglu"))
    window = args.get("window_size")
    model = {name: args[name] for name in _TAKEN} | {
        "seq_length": seq_length or args["seq_length"],
        "position_embedding_type": positions,
        "group_query_attention": grouped,
        "num_query_groups": args.get("num_query_groups") if grouped else None,
        "rotary_base": _number(args, 10000.0, "rotary_base"),
        "rotary_percent": _number(args, 1.0, "rotary_percent"),
        "norm_epsilon": _number(args, 1e-5, "norm_epsilon", "layernorm_epsilon"),
        "swiglu": swiglu,
        "disable_bias_linear": not bias,
        "add_qkv_bias": bias or bool(args.get("add_qkv_bias")),
        "untie_embeddings_and_output_weights": bool(
            args.get("untie_embeddings_and_output_weights")
        ),
        "qk_layernorm": bool(args.get("qk_layernorm")),
        "window_size": None if window is None or window[0] < 0 else (window[0], 0),
        "make_vocab_size_divisible_by": divisible_by,
        "hidden_dropout": _number(args, 0.0, "hidden_dropout"),
        "attention_dropout": _number(args, 0.0, "attention_dropout"),
    }
    if args.get("use_rope_scaling"):
        factor = _number(args, 8.0, "rope_scaling_factor")
        model |= {"use_rope_scaling": True, "rope_scaling_factor": factor, **_ROPE_CONSTANTS}
    if not swiglu:
        # Megatron's fused bias and GELU is the tanh form; the unfused one is exact.
        tanh = bool(args.get("openai_gelu") or (bias and args.get("bias_gelu_fusion")))
        model["activation"] = "gelu-tanh" if tanh else "gelu"
    return model


def _number(args: Mapping[str, Any], default: float, *names: str) -> float:
    """The first of these settings that is there; zero is a value, and no missing one."""
    found = (args[name] for name in names if args.get(name) is not None)
    return float(next(found, default))


def _check_types(path: Path, args: Mapping[str, Any]) -> None:
    """Refuse settings of types that would be taken for something else.

    Raises:
        CheckpointError: naming the setting.
    """

    def check(name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise CheckpointError(f"{path}: args.{name} is {args[name]!r:.60}; allowed: {allowed}")

    for name in _SWITCHES:
        check(name, isinstance(args.get(name), (bool, type(None))), "True or False")
    for name in _SIZES:
        check(name, args.get(name) is None or is_size(args[name]), "a positive whole number")
    for name in _NUMBERS:
        check(name, args.get(name) is None or is_number(args[name]), "a number >= 0")
    window = args.get("window_size")
    pair = isinstance(window, (tuple, list)) and [type(n) for n in window] == [int, int]
    sees_back = pair and window is not None and window[1] in (0, -1)
    check("window_size", window is None or sees_back, "two numbers, the second 0 or -1")


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
    tanh = model.activation == "gelu-tanh"
    return {
        "num_layers": model.num_layers,
        "encoder_num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_dim,
        "group_query_attention": model.group_query_attention,
        "num_query_groups": model.query_groups if model.group_query_attention else 1,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.positions,
        "position_embedding_type": model.position_embedding_type,
        "add_position_embedding": True,
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "use_rope_scaling": model.use_rope_scaling,
        "rope_scaling_factor": model.rope_scaling_factor,
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "swiglu": model.swiglu,
        "openai_gelu": False,
        "squared_relu": False,
        "bias_gelu_fusion": tanh,
        "add_bias_linear": model.attention_output_bias,
        "add_qkv_bias": model.qkv_bias and not model.attention_output_bias,
        "qk_layernorm": model.qk_layernorm,
        "window_size": None if model.window_size is None else tuple(model.window_size),
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "vocab_size": shape.vocab_size,
        "padded_vocab_size": shape.padded_vocab_size,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "apply_layernorm_1p": False,
        "num_experts": None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "use_mcore_models": True,
        "ckpt_format": "torch_dist",
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
