"""Fields of the `config.json` of models that people have, as they are published; sizes are small.

Ids of tokens, sizes and lengths are shrunk; every other field and value is the published one.
"""

from typing import Any

import torch
from torch import Tensor

from tests.convert.converted import VOCAB

Config = dict[str, Any]

_LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": VOCAB,
}
_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
    "rope_type": "llama3",
}
_LLAMA3: Config = _LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 500000.0,
    "transformers_version": "4.40.0.dev0",
}
_LLAMA31: Config = _LLAMA3 | {
    "eos_token_id": [3, 5, 6],
    "mlp_bias": False,
    "rope_scaling": _SCALING,
    "transformers_version": "4.42.3",
}
_LLAMA32: Config = _LLAMA31 | {
    "head_dim": 8,
    "rope_scaling": _SCALING | {"factor": 32.0},
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}
_SMOLLM2: Config = _LLAMA | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 36,
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers_version": "4.40.1",
}
_MISTRAL: Config = {name: value for name, value in _LLAMA.items() if name != "pretraining_tp"} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "rope_theta": 10000.0,
    "sliding_window": 8,
    "transformers_version": "4.34.0.dev0",
}
del _MISTRAL["rope_scaling"]
_QWEN25: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 3,
    "eos_token_id": 3,
    "hidden_act": "silu",
    "hidden_size": 28,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "max_window_layers": 1,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
_QWEN3: Config = {name: value for name, value in _QWEN25.items() if name != "use_mrope"} | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 16,
    "hidden_size": 32,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "rope_scaling": None,
    "sliding_window": None,
    "transformers_version": "4.51.0",
}
_GPT2: Config = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 5,
    "embd_pdrop": 0.1,
    "eos_token_id": 5,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": VOCAB,
}

CONVERTED: dict[str, Config] = {
    "Llama-2-7b-hf": _LLAMA | {"num_key_value_heads": 4, "transformers_version": "4.31.0.dev0"},
    "vicuna-7b-v1.5": _LLAMA
    | {"_name_or_path": "meta", "max_sequence_length": 128, "pad_token_id": 0},
    "CodeLlama-7b-hf": _LLAMA | {"num_key_value_heads": 4, "rope_theta": 1000000},
    "TinyLlama-1.1B": _LLAMA
    | {"attention_bias": False, "rope_theta": 10000.0, "transformers_version": "4.35.0"},
    "Meta-Llama-3-8B": _LLAMA3,
    "Llama-3.1-8B-Instruct": _LLAMA31,
    "Llama-3.2-1B": _LLAMA32,
    "Llama-3.2-1B-unsloth": _LLAMA32 | {"pad_token_id": 4, "unsloth_fixed": True},
    "Llama-3.3-70B-Instruct": _LLAMA31 | {"head_dim": 8, "transformers_version": "4.47.0.dev0"},
    "DeepSeek-R1-Distill-Llama-8B": _LLAMA31 | {"eos_token_id": 3, "_commit_hash": None},
    "SmolLM2-135M": _SMOLLM2,
    "SmolLM2-135M-Instruct": _SMOLLM2
    | {
        "pad_token_id": 2,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    },
    "Mistral-7B-v0.1": _MISTRAL,
    "Mistral-7B-v0.3": _MISTRAL
    | {"attention_dropout": 0.0, "rope_theta": 1000000.0, "sliding_window": None},
    "Mistral-Nemo-Base-2407": _MISTRAL | {"head_dim": 10, "sliding_window": None},
    "zephyr-7b-beta": _MISTRAL | {"_flash_attn_2_enabled": True, "pad_token_id": 2},
    "Qwen2.5-0.5B": _QWEN25,
    "Qwen2.5-7B-Instruct": _QWEN25 | {"tie_word_embeddings": False, "max_window_layers": 2},
    "Qwen2.5-1.5B, transformers 5": {
        name: value for name, value in _QWEN25.items() if name not in ("rope_theta", "torch_dtype")
    }
    | {
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 2,
        "pad_token_id": None,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "sliding_window": None,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": _QWEN25 | {"rope_theta": 10000, "tie_word_embeddings": False},
    "Qwen3-0.6B": _QWEN3,
    "Qwen3-8B": _QWEN3 | {"tie_word_embeddings": False},
    "gpt2": _GPT2,
    "distilgpt2": _GPT2
    | {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    # Values that an edit or another program leaves there.
    "a window that is off": _LLAMA
    | {"max_window_layers": 2, "sliding_window": 8, "use_sliding_window": False},
    "sums in two parts": _LLAMA | {"pretraining_tp": 2, "_attn_implementation_internal": "sdpa"},
}

_YARN = {"attn_factor": 0.8782488562869419, "factor": 4.0, "rope_type": "yarn"}
# Each changes what the weights compute, or is another architecture.
REFUSED: dict[str, tuple[Config, str]] = {
    "DeepSeek-R1-0528-Qwen3-8B": (
        _QWEN3 | {"rope_scaling": _YARN | {"original_max_position_embeddings": 32}},
        "rope_scaling is .*yarn",
    ),
    "deepseek-coder-6.7b-base": (
        _LLAMA | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
        "rope_scaling is .*linear",
    ),
    "Mixtral-8x7B-v0.1": (
        _MISTRAL | {"model_type": "mixtral", "num_local_experts": 8},
        "model_type is 'mixtral'; allowed: llama, mistral",
    ),
    "SmolLM3-3B": (_LLAMA3 | {"model_type": "smollm3"}, "model_type is 'smollm3'"),
    "Qwen2.5-7B-Instruct-AWQ": (
        _QWEN25 | {"quantization_config": {"bits": 4, "quant_method": "awq"}},
        "quantization_config is .*awq",
    ),
    "Qwen2.5-7B-Instruct-1M": (
        _QWEN25 | {"dual_chunk_attention_config": {"chunk_size": 262144}},
        "unknown fields .* dual_chunk_attention_config",
    ),
    "Llama-3.2-3B for MLX, four bits": (
        _LLAMA32 | {"quantization": {"bits": 4, "group_size": 64}},
        "unknown fields .* quantization =",
    ),
    "rope of pairs": (_SMOLLM2 | {"rope_interleaved": True}, "rope_interleaved is True"),
    "a window of Llama's": (_LLAMA | {"sliding_window": 8}, "sliding_window is 8; allowed: None"),
}


def weights_of(config: Config) -> dict[str, Tensor]:
    """Weights of such a model under transformers' names, fp32."""
    shapes = _gpt2_shapes(config) if config["model_type"] == "gpt2" else _llama_shapes(config)
    generator = torch.Generator().manual_seed(5)
    found = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    return {
        name: 1 + value if value.dim() == 1 and name.endswith("weight") else value
        for name, value in found.items()
    }


def _llama_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    rows = {"q": dim * config["num_attention_heads"]}
    rows |= dict.fromkeys("kv", dim * config["num_key_value_heads"])
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "self_attn.o_proj.weight": (hidden, rows["q"]),
    }
    for part, size in rows.items():
        layer[f"self_attn.{part}_proj.weight"] = (size, hidden)
        if config["model_type"] == "qwen2":
            layer[f"self_attn.{part}_proj.bias"] = (size,)
    if config["model_type"] == "qwen3":
        layer |= {f"self_attn.{part}_norm.weight": (dim,) for part in "qk"}
    shapes = {"model.embed_tokens.weight": (VOCAB, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, hidden)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _gpt2_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    hidden = config["n_embd"]
    sizes = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    sizes |= {"mlp.c_fc": (hidden, 4 * hidden), "mlp.c_proj": (4 * hidden, hidden)}
    norms = ("ln_1", "ln_2")
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB, hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
        "transformer.ln_f.weight": (hidden,),
        "transformer.ln_f.bias": (hidden,),
    }
    for i in range(config["n_layer"]):
        for name in norms:
            shapes |= {f"transformer.h.{i}.{name}.{part}": (hidden,) for part in ("weight", "bias")}
        for name, (rows, columns) in sizes.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = (rows, columns)
            shapes[f"transformer.h.{i}.{name}.bias"] = (columns,)
    return shapes
