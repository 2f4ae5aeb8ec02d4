"""Logits against Hugging Face's Llama and GPT-2, if `transformers` is there; no downloads."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model.small import GPT2, LLAMA, VOCAB, Run, micro_batches, randomize, small_config
from tests.model.small import start_run as start
from tests.support.oracles import need

need("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

pytestmark = pytest.mark.usefixtures("one_rank")
HIDDEN, HEADS, GROUPS, DIM, FFN, LENGTH = 32, 4, 2, 16, 64, 64
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def randomized(style: dict[str, Any], **changes: Any) -> tuple[Run, dict[str, Tensor]]:
    run = start(small_config(style, seq_length=LENGTH, **changes))
    randomize(run.model.parameters, std=0.15)
    run.model.copy_tied_embedding()
    return run, {name: p.data.full_tensor() for name, p in run.model.parameters.items()}


def compare(run: Run, model: Any) -> None:
    """Logits of both on one micro-batch, all positions."""
    batch = micro_batches(run, 0)[0]
    (stage,) = run.model.stages
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = stage(batch["tokens"], batch["position_ids"], batch["seed"])
        wanted = model.eval()(batch["tokens"]).logits
    found = stage.full_logits(local).transpose(0, 1)
    assert wanted.std() > 0.5
    assert (found - wanted).abs().max() < 2e-5 * wanted.abs().max()


def load(model: Any, weights: dict[str, Tensor]) -> None:
    """Every parameter of the other model gets a value, none is left at random."""
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert all("inv_freq" in key or key == "lm_head.weight" for key in result.missing_keys)


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_llama(scaling):
    run, ours = randomized(
        LLAMA,
        kv_channels=DIM,
        rotary_base=500000.0,
        norm_epsilon=1e-6,
        add_qkv_bias=True,
        add_attention_output_bias=True,
        use_rope_scaling=scaling is not None,
        rope_original_max_position_embeddings=32,
    )
    rope = {"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        attention_bias=True,
        tie_word_embeddings=False,
        rope_theta=500000.0,
        rope_scaling=rope if scaling else None,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    weights = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"][:VOCAB],
        "model.norm.weight": ours["decoder.final_layernorm.weight"],
        "lm_head.weight": ours["output_layer.weight"][:VOCAB],
    }
    for layer in range(2):
        mine, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attention = f"{mine}.self_attention"
        for kind in ("weight", "bias"):
            fused = ours[f"{attention}.linear_qkv.{kind}"].unflatten(
                0, (GROUPS, HEADS // GROUPS + 2, DIM)
            )
            weights[f"{theirs}.self_attn.q_proj.{kind}"] = fused[:, :-2].flatten(0, 2)
            weights[f"{theirs}.self_attn.k_proj.{kind}"] = fused[:, -2].flatten(0, 1)
            weights[f"{theirs}.self_attn.v_proj.{kind}"] = fused[:, -1].flatten(0, 1)
            weights[f"{theirs}.self_attn.o_proj.{kind}"] = ours[f"{attention}.linear_proj.{kind}"]
        gate, up = ours[f"{mine}.mlp.linear_fc1.weight"]
        weights |= {
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": ours[f"{mine}.mlp.linear_fc2.weight"],
            f"{theirs}.input_layernorm.weight": ours[f"{mine}.input_layernorm.weight"],
            f"{theirs}.post_attention_layernorm.weight": ours[f"{mine}.pre_mlp_layernorm.weight"],
        }
    model = transformers.LlamaForCausalLM(config)
    load(model, weights)
    compare(run, model)


def test_gpt2():
    run, ours = randomized(GPT2, max_position_embeddings=LENGTH)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=HIDDEN,
        n_layer=2,
        n_head=HEADS,
        n_inner=FFN,
        activation_function="gelu_new",
        attn_implementation="eager",
    )
    weights = {
        "transformer.wte.weight": ours["embedding.word_embeddings.weight"][:VOCAB],
        "transformer.wpe.weight": ours["embedding.position_embeddings.weight"],
    }
    norms = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}
    linears = {
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    for kind in ("weight", "bias"):
        weights[f"transformer.ln_f.{kind}"] = ours[f"decoder.final_layernorm.{kind}"]
        for layer in range(2):
            mine, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
            for our_name, their_name in norms.items():
                weights[f"{theirs}.{their_name}.{kind}"] = ours[f"{mine}.{our_name}.{kind}"]
            # Theirs is stored (in, out), and as all queries, all keys, all values.
            fused = ours[f"{mine}.self_attention.linear_qkv.{kind}"].unflatten(0, (HEADS, 3, -1))
            values = fused.transpose(0, 1).flatten(0, 2)
            weights[f"{theirs}.attn.c_attn.{kind}"] = values.t() if kind == "weight" else values
            for our_name, their_name in linears.items():
                value = ours[f"{mine}.{our_name}.{kind}"]
                weights[f"{theirs}.{their_name}.{kind}"] = value.t() if kind == "weight" else value
    model = transformers.GPT2LMHeadModel(config)
    load(model, weights)
    compare(run, model)
