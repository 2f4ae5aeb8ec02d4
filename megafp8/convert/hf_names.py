"""Hugging Face's tensor names: Llama's family, and GPT-2's."""

from __future__ import annotations

from megafp8.config import ModelShape, ParameterSpec
from megafp8.config.shape import EMBEDDING, OUTPUT
from megafp8.convert.routes import (
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

_LLAMA_TOP = {EMBEDDING: "model.embed_tokens.weight", OUTPUT: "lm_head.weight"}
_LLAMA_MODULES = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc2": "mlp.down_proj",
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
GPT2_PREFIX = "transformer."


def routes(model_type: str, shape: ModelShape) -> list[Route]:
    """Return a route for every parameter, in the order of the forward pass.

    Args:
        model_type: one of MODEL_TYPES.
        shape: the model's sizes.
    """
    make = _gpt2 if model_type == "gpt2" else _llama
    return [make(spec, shape) for spec in shape.parameters()]


def is_buffer(name: str) -> bool:
    """Tell whether a stored tensor is a constant that older versions saved with the weights."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


def _layer_parts(spec: ParameterSpec) -> tuple[str, str, str]:
    """`decoder.layers.3.mlp.linear_fc1.weight` -> ("3", "mlp.linear_fc1", "weight")."""
    assert spec.layer is not None, spec.name
    rest = spec.name.removeprefix(f"decoder.layers.{spec.layer}.")
    module, _, kind = rest.rpartition(".")
    return str(spec.layer), module, kind


def _llama(spec: ParameterSpec, shape: ModelShape) -> Route:
    if spec.name in _LLAMA_TOP:
        return vocabulary(spec, shape, _LLAMA_TOP[spec.name], shape.vocab_size)
    if spec.layer is None:
        assert spec.name == "decoder.final_layernorm.weight", spec.name
        return same(spec, "model.norm.weight")
    layer, module, kind = _layer_parts(spec)
    prefix = f"model.layers.{layer}"
    if module == "self_attention.linear_qkv":
        names = [f"{prefix}.self_attn.{part}_proj.{kind}" for part in "qkv"]
        return separate_qkv(spec, shape, names)
    if module == "mlp.linear_fc1":
        return gate_and_up(spec, [f"{prefix}.mlp.{part}_proj.{kind}" for part in ("gate", "up")])
    return same(spec, f"{prefix}.{_LLAMA_MODULES[module]}.{kind}")


def _gpt2(spec: ParameterSpec, shape: ModelShape) -> Route:
    if spec.name == OUTPUT:
        return vocabulary(spec, shape, "lm_head.weight", shape.vocab_size)
    if spec.layer is None:
        theirs = GPT2_PREFIX + _GPT2_TOP[spec.name]
        if spec.name == EMBEDDING:
            return vocabulary(spec, shape, theirs, shape.vocab_size)
        return same(spec, theirs)
    layer, module, kind = _layer_parts(spec)
    theirs = f"{GPT2_PREFIX}h.{layer}.{_GPT2_MODULES[module]}.{kind}"
    matrix = spec.kind == "linear"
    if module == "self_attention.linear_qkv":
        return stacked_qkv(spec, shape, theirs, transpose=matrix)
    return transposed(spec, theirs) if matrix else same(spec, theirs)
