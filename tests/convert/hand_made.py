"""A Llama folder in Hugging Face's form, made without transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, HEADS, GROUPS, DIM, FFN, VOCAB, LAYERS = 160, 4, 2, 40, 192, 100, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.40.0",
}


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= {
            f"{prefix}.self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (GROUPS * DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (GROUPS * DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"{prefix}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, FFN),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return found


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(s, generator=generator) * 0.1 for name, s in shapes().items()}


def make_folder(
    folder: Path,
    tensors: dict[str, Tensor] | None = None,
    shards: int = 1,
    parents: bool = False,
    **changes: Any,
) -> Path:
    """Write config.json (with changes; None removes a field) and one or more shards."""
    folder.mkdir(parents=parents)
    tensors = weights() if tensors is None else tensors
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None or k not in changes}
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names, owners = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file)
        owners |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": owners}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
