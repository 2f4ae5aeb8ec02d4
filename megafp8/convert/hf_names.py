"""Hugging Face's tensor names: Llama's family, and GPT-2's."""

from __future__ import annotations

from megafp8.config import ModelShape, ParameterSpec
from megafp8.config.shape import EMBEDDING, OUTPUT, linear_names
from megafp8.convert.routes import (
    HEAD,
    Route,
    gate_and_up,
    same,
    separate_qkv,
    stacked_qkv,
    transposed,
    vocabulary,
)

LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
MODEL_TYPES = (*LLAMA_FAMILY, "gpt2")
GPT2_PREFIX = "transformer."

_LLAMA_TOP = {
    EMBEDDING: "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_LLAMA_NORMS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
}
_GPT2_TOP = {
    EMBEDDING: "wte.weight",
    "embedding.position_embeddings.weight": "wpe.weight",
    "decoder.final_layernorm.weight": "ln_f.weight",
    "decoder.final_layernorm.bias": "ln_f.bias",
}
_GPT2_MODULES = {
    "input_layernorm": "ln_1",
    "pre_mlp_layernorm": "ln_2",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def routes(model_type: str, shape: ModelShape, prefix: str = GPT2_PREFIX) -> list[Route]:
    """Return a route for every parameter, in the order of the forward pass.

    Args:
        model_type: one of MODEL_TYPES.
        shape: the model's sizes.
        prefix: before GPT-2's names.
    """
    gpt2 = model_type == "gpt2"
    top = {name: prefix + theirs for name, theirs in _GPT2_TOP.items()} if gpt2 else _LLAMA_TOP
    top = top | {OUTPUT: HEAD}
    linears = {item.name: item.hf_names for item in linear_names(shape.num_layers, shape.swiglu)}
    found = []
    for spec in shape.parameters():
        module, _, kind = spec.name.rpartition(".")
        inner = module.removeprefix(f"decoder.layers.{spec.layer}.")
        if spec.name in (EMBEDDING, OUTPUT):
            route = vocabulary(spec, shape, top[spec.name], shape.vocab_size)
        elif spec.layer is None:
            route = same(spec, top[spec.name])
        elif gpt2:
            theirs = f"{prefix}h.{spec.layer}.{_GPT2_MODULES[inner]}.{kind}"
            qkv = inner == "self_attention.linear_qkv"
            route = stacked_qkv(spec, shape, theirs) if qkv else transposed(spec, theirs)
        elif module in linears:
            route = _llama(spec, shape, [f"{theirs}.{kind}" for theirs in linears[module]])
        else:
            route = same(spec, f"model.layers.{spec.layer}.{_LLAMA_NORMS[inner]}.{kind}")
        found.append(route)
    return found


def is_buffer(name: str) -> bool:
    """Tell whether a stored tensor is a constant that older versions saved with the weights."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


def _llama(spec: ParameterSpec, shape: ModelShape, theirs: list[str]) -> Route:
    if len(theirs) == 3:
        return separate_qkv(spec, shape, theirs)
    return gate_and_up(spec, theirs) if len(theirs) == 2 else same(spec, theirs[0])
