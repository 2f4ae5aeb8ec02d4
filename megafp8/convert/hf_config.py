"""Hugging Face's `config.json` as our section `model`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megafp8.config.model import ModelConfig
from megafp8.convert.hf_fields import KEPT, Fields, is_number
from megafp8.convert.hf_names import MODEL_TYPES
from megafp8.errors import CheckpointError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
# A table of 131072 rotary positions is of no use on the first day, and a sample would compute them.
LONGEST_DEFAULT_CONTEXT = 4096
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_LAYER_KINDS = ("full_attention", "sliding_attention")
_QWEN3_HEAD_DIM = 128  # transformers' default where the file has none
# Rope type llama3: their names and ours.
_LLAMA3 = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position_embeddings",
}


def describe(
    fields: Fields, seq_length: int | None, divisible_by: int
) -> tuple[dict[str, Any], int]:
    """Translate a `config.json`.

    Args:
        fields: its fields.
        seq_length: context for our configuration; None for the model's own, at most 4096.
        divisible_by: the vocabulary is padded to a multiple of it.

    Returns:
        Fields of our section `model`, and the tokens of the vocabulary without padding.

    Raises:
        CheckpointError: naming the field that is missing, wrong or not supported.
    """
    model_type = fields.get("model_type")
    if model_type not in MODEL_TYPES:
        raise fields.error("model_type", ", ".join(MODEL_TYPES))
    fields.expect("quantization_config", None)
    fields.expect("is_encoder_decoder", False)
    fields.expect("pruned_heads", {}, None)
    model = _from_gpt2(fields) if model_type == "gpt2" else _from_llama(fields, model_type)
    vocab_size = fields.whole("vocab_size")
    tied = fields.switch("tie_word_embeddings", model_type == "gpt2")
    fields.finish()
    longest = model["max_position_embeddings"]
    model |= {
        "untie_embeddings_and_output_weights": not tied,
        "seq_length": seq_length or min(longest, LONGEST_DEFAULT_CONTEXT),
        "make_vocab_size_divisible_by": divisible_by,
    }
    return model, vocab_size


def _heads(heads: int, groups: int) -> dict[str, Any]:
    grouped = groups != heads
    return {
        "num_attention_heads": heads,
        "group_query_attention": grouped,
        "num_query_groups": groups if grouped else None,
    }


def _from_llama(fields: Fields, model_type: str) -> dict[str, Any]:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if fields.get("head_dim", None) is not None:
        named, head_dim = "head_dim", fields.whole("head_dim")
    else:
        named, head_dim = "hidden_size", hidden // heads
        if model_type == "qwen3":
            head_dim = _QWEN3_HEAD_DIM
        elif hidden % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
    if head_dim % 2:
        raise fields.error(named, f"heads of an even size for rope, found {head_dim}")
    if fields.get("hidden_act") not in ("silu", "swish"):
        raise fields.error("hidden_act", "silu")
    fields.expect("rope_interleaved", False, None)
    attention_bias = model_type in ("llama", "qwen3") and fields.switch("attention_bias", False)
    layers = fields.whole("num_hidden_layers")
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        **_heads(heads, fields.whole("num_key_value_heads", heads)),
        "kv_channels": head_dim,
        "ffn_hidden_size": fields.whole("intermediate_size"),
        "max_position_embeddings": fields.whole("max_position_embeddings"),
        "position_embedding_type": "rope",
        **_from_rope(fields),
        "normalization": "RMSNorm",
        "norm_epsilon": fields.number("rms_norm_eps"),
        "swiglu": True,
        "disable_bias_linear": True,
        "add_qkv_bias": attention_bias or model_type == "qwen2",
        "add_attention_output_bias": attention_bias,
        "add_mlp_bias": model_type == "llama" and fields.switch("mlp_bias", False),
        "qk_layernorm": model_type == "qwen3",
        "window_size": _from_window(fields, model_type, layers),
        "hidden_dropout": 0.0,
        "attention_dropout": fields.number("attention_dropout", 0.0),
    }


def _from_rope(fields: Fields) -> dict[str, Any]:
    """Transformers 5 writes all under `rope_parameters`, earlier ones two fields."""
    new, old = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    name = "rope_parameters" if new else "rope_scaling"
    inner = (new or old).get("rope_theta", 10000.0)
    if not is_number(inner):
        raise fields.error(name, "a number >= 0 as its rope_theta")
    theta = fields.number("rope_theta", inner)
    if new.get("rope_theta", theta) != theta:
        raise fields.error("rope_theta", f"{new['rope_theta']} as in rope_parameters")
    values = {"rope_theta": theta, **(new or old)}
    if new and old and {**values, **old} != values:
        raise fields.error("rope_scaling", "the same as rope_parameters")
    if values["rope_theta"] != theta:
        raise fields.error(name, f"rope_theta {theta:g} in it, as beside it")
    old_kind = values.pop("type", None)
    kind = values.pop("rope_type", old_kind or "default")
    if old_kind not in (None, kind):
        raise fields.error(name, "the same type and rope_type")
    if values.pop("partial_rotary_factor", 1.0) not in (1, None):
        raise fields.error(name, "a partial_rotary_factor of 1.0")
    if fields.get("partial_rotary_factor", 1.0) not in (1, None):
        raise fields.error("partial_rotary_factor", "1.0")
    if kind == "default":
        rest = set(values) - {"rope_theta"}
        if rest:
            raise fields.error(name, f"no {', '.join(sorted(rest))} without a rope_type")
        return {"rotary_base": float(values["rope_theta"])}
    numbers = all(is_number(values.get(name)) for name in _LLAMA3)
    numbers = numbers and values["original_max_position_embeddings"] % 1 == 0
    if kind != "llama3" or set(values) != {"rope_theta", *_LLAMA3} or not numbers:
        raise fields.error(name, f"rope_type default, or llama3 with {', '.join(_LLAMA3)}")
    scaling = {ours: float(values[theirs]) for theirs, ours in _LLAMA3.items()}
    original = "rope_original_max_position_embeddings"
    return {
        "rotary_base": float(values["rope_theta"]),
        "use_rope_scaling": True,
        **scaling,
        original: int(scaling[original]),
    }


def _layer_types(fields: Fields, layers: int) -> list[str]:
    """Which layers see a window, where the file has a list of them; else empty."""
    kinds = fields.get("layer_types", None)
    if kinds is None:
        return []
    known = isinstance(kinds, list) and all(kind in _LAYER_KINDS for kind in kinds)
    if not known or len(kinds) != layers:
        raise fields.error("layer_types", f"{layers} of {' or '.join(_LAYER_KINDS)}")
    return kinds


def _from_window(fields: Fields, model_type: str, layers: int) -> tuple[int, int] | None:
    """A token sees `sliding_window` tokens, itself included; ours counts those before it."""
    kinds = _layer_types(fields, layers)
    if model_type in ("llama", "mistral"):
        fields.get("max_window_layers", None)  # Qwen's models alone read it
    if model_type == "llama":
        if fields.get("use_sliding_window", None) is False:
            fields.get("sliding_window", None)
        else:
            fields.expect("sliding_window", None)
        window = None
    elif model_type == "mistral":
        window = fields.get("sliding_window")
        if window is not None and "full_attention" in kinds:
            # transformers' model has the window in all layers, whatever the list says.
            raise fields.error("layer_types", "sliding_attention alone, as sliding_window is given")
    else:
        used = fields.switch("use_sliding_window", False)
        window = fields.get("sliding_window") if used else fields.get("sliding_window", None)
        window = window if used else None
        if window is None or kinds:
            fields.get("max_window_layers", None)  # says nothing, or what layer_types says
        else:
            first = fields.get("max_window_layers")
            if type(first) is not int or first < 0:
                raise fields.error("max_window_layers", "a whole number >= 0")
            if 0 < first < layers:  # layers from this one on have the window
                raise fields.error("max_window_layers", f"0, or {layers} and more: one kind of all")
            window = window if first == 0 else None
    if len(set(kinds)) > 1:
        raise fields.error("layer_types", "one kind for all layers")
    if window is None or (kinds and kinds[0] == "full_attention"):
        if kinds and kinds[0] != "full_attention":
            raise fields.error("layer_types", "full_attention, or a sliding_window")
        return None
    return fields.whole("sliding_window") - 1, 0


def _from_gpt2(fields: Fields) -> dict[str, Any]:
    hidden, heads = fields.whole("n_embd"), fields.whole("n_head")
    positions = fields.whole("n_positions")
    fields.expect("n_ctx", positions)
    fields.expect("scale_attn_weights", True)
    fields.expect("scale_attn_by_inverse_layer_idx", False)
    fields.expect("reorder_and_upcast_attn", False)
    fields.expect("add_cross_attention", False)
    activation = fields.get("activation_function", "gelu_new")
    if activation not in ("gelu", *_TANH_GELU):
        raise fields.error("activation_function", ", ".join(("gelu", *_TANH_GELU)))
    dropout = fields.number("resid_pdrop", 0.1)
    if fields.number("embd_pdrop", 0.1) != dropout:
        raise fields.error("embd_pdrop", f"{dropout:g} as resid_pdrop: there is one hidden_dropout")
    return {
        "num_layers": fields.whole("n_layer"),
        "hidden_size": hidden,
        **_heads(heads, heads),
        "ffn_hidden_size": fields.whole("n_inner", 4 * hidden),
        "max_position_embeddings": positions,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "activation": "gelu-tanh" if activation in _TANH_GELU else "gelu",
        "hidden_dropout": dropout,
        "attention_dropout": fields.number("attn_pdrop", 0.1),
    }


def refusal(model_type: str, model: ModelConfig) -> str | None:
    """Why a model of ours cannot be written as this type; None if it can."""
    gpt2 = model_type == "gpt2"
    norm, positions = ("LayerNorm", "learned_absolute") if gpt2 else ("RMSNorm", "rope")
    qkv, output, mlp = model.qkv_bias, model.attention_output_bias, model.mlp_bias
    rules = [
        (model.normalization == norm, f"--normalization is not {norm}"),
        (
            model.position_embedding_type == positions,
            f"positions are not {positions.removesuffix('_absolute')}",
        ),
        (model.swiglu != gpt2, f"--swiglu is {'on' if gpt2 else 'off'}"),
    ]
    if gpt2:
        rules += [
            (qkv and output and mlp, "a bias is missing"),
            (model.query_groups == model.num_attention_heads, "--group-query-attention is on"),
            (model.head_dim * model.num_attention_heads == model.hidden_size, "--kv-channels"),
            (not model.qk_layernorm, "--qk-layernorm is on"),
            (model.window_size is None, "--window-size is given"),
        ]
    else:
        rules += [
            (model.rotary_percent == 1.0, "--rotary-percent is not 1"),
            (model.qk_layernorm == (model_type == "qwen3"), f"--qk-layernorm {model.qk_layernorm}"),
            (model.window_size is None or model_type != "llama", "--window-size is given"),
        ]
    if model_type == "mistral":
        rules.append((not (qkv or output or mlp), "a linear has a bias"))
    elif model_type == "qwen2":
        only = qkv and not (output or mlp)
        rules.append((only, "biases are not those of queries, keys and values alone"))
    elif not gpt2:
        # transformers' LlamaConfig, and it alone, refuses other sizes with a head_dim too.
        whole = model.hidden_size % model.num_attention_heads == 0 or model_type != "llama"
        rules += [
            (whole, "the hidden size is no multiple of the heads"),
            (qkv == output, "one of --add-qkv-bias and --add-attention-output-bias is on"),
            (model_type == "llama" or not mlp, "--add-mlp-bias is on"),
        ]
    return next((reason for holds, reason in rules if not holds), None)


def choose_model_type(model: ModelConfig, preferred: str | None) -> str:
    """The type to write: the one that it came from if it still fits, else the first that does.

    Raises:
        CheckpointError: none fits; says why for each.
    """
    order = ("llama", "qwen2", "qwen3", "mistral", "gpt2")
    for model_type in (preferred, *order) if preferred in order else order:
        if refusal(model_type, model) is None:
            return model_type
    reasons = "; ".join(f"{kind}: {refusal(kind, model)}" for kind in ARCHITECTURES)
    raise CheckpointError(f"no Hugging Face architecture computes what this model does: {reasons}")


def to_hf_config(
    model: ModelConfig,
    model_type: str,
    vocab_size: int,
    dtype: torch.dtype,
    source: Mapping[str, Any],
    eos: int | None,
) -> dict[str, Any]:
    """The `config.json` of a model.

    Args:
        model: sizes and variants.
        model_type: from `choose_model_type`.
        vocab_size: without padding.
        dtype: of the weights.
        source: the `config.json` it came from, for fields without effect; empty if none.
        eos: end-of-document id for where `source` names none.
    """
    assert refusal(model_type, model) is None, model_type
    kept: dict[str, Any] = {"bos_token_id": None, "eos_token_id": eos}
    kept |= {name: source[name] for name in KEPT if name in source}
    name = str(dtype).removeprefix("torch.")
    common = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": name,
        "dtype": name,
        **kept,
    }
    return common | (_to_gpt2(model) if model_type == "gpt2" else _to_llama(model, model_type))


def _to_llama(model: ModelConfig, model_type: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.use_rope_scaling:
        scaling = {theirs: getattr(model, ours) for theirs, ours in _LLAMA3.items()}
        rope = {"rope_type": "llama3", **scaling}
    values = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.query_groups,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.positions,
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        # Both spellings: inference engines read the old one, transformers 5 the new one.
        "rope_theta": model.rotary_base,
        "rope_scaling": rope if model.use_rope_scaling else None,
        "rope_parameters": {"rope_theta": model.rotary_base, **rope},
    }
    if model_type in ("llama", "qwen3"):
        values["attention_bias"] = model.qkv_bias
    if model_type == "llama":
        values["mlp_bias"] = model.mlp_bias
    window = None if model.window_left is None else model.window_left + 1
    if model_type == "mistral":
        values["sliding_window"] = window
    if model_type in ("qwen2", "qwen3"):
        values |= {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": 0 if window is not None else model.num_layers,
        }
    return values


def _to_gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_layer": model.num_layers,
        "n_inner": None if model.ffn_size == 4 * model.hidden_size else model.ffn_size,
        "n_positions": model.positions,
        "n_ctx": model.positions,
        "activation_function": "gelu_new" if model.activation == "gelu-tanh" else "gelu",
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }
