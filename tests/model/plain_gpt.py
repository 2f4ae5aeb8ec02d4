"""A GPT in plain torch, written from the papers' formulas on a dict of whole parameters.

It knows the canonical parameter names and nothing else of the package: no parallelism, no custom
autograd, one sample at a time, attention as an explicit masked softmax.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """What the parameters' shapes do not tell."""

    layers: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    llama: bool
    rotary_base: float = 10000.0
    epsilon: float = 1e-5
    window: int | None = None


def logits(tokens: Tensor, parameters: dict[str, Tensor], sizes: Sizes) -> Tensor:
    """int64 [b, s] -> [b, s, vocab]."""
    return torch.stack([_sample(row, parameters, sizes) for row in tokens])


def loss_sum(
    tokens: Tensor, labels: Tensor, mask: Tensor, parameters: dict[str, Tensor], sizes: Sizes
) -> Tensor:
    """Sum of masked token losses."""
    scores = logits(tokens, parameters, sizes)
    losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum()


def _sample(tokens: Tensor, p: dict[str, Tensor], sizes: Sizes) -> Tensor:
    table = p["embedding.word_embeddings.weight"]
    x = table[tokens]  # [s, h]
    if not sizes.llama:
        x = x + p["embedding.position_embeddings.weight"][: len(tokens)]
    for layer in range(sizes.layers):
        prefix = f"decoder.layers.{layer}"
        normed = _norm(x, p, f"{prefix}.input_layernorm", sizes)
        x = x + _attention(normed, p, f"{prefix}.self_attention", sizes)
        x = x + _mlp(_norm(x, p, f"{prefix}.pre_mlp_layernorm", sizes), p, f"{prefix}.mlp", sizes)
    x = _norm(x, p, "decoder.final_layernorm", sizes)
    head = p.get("output_layer.weight", table)
    return (x @ head.t())[:, : sizes.vocab]


def _norm(x: Tensor, p: dict[str, Tensor], name: str, sizes: Sizes) -> Tensor:
    weight = p[f"{name}.weight"]
    if sizes.llama:
        return x / (x.pow(2).mean(-1, keepdim=True) + sizes.epsilon).sqrt() * weight
    return F.layer_norm(x, (x.shape[-1],), weight, p[f"{name}.bias"], sizes.epsilon)


def _linear(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].t()
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def _attention(x: Tensor, p: dict[str, Tensor], prefix: str, sizes: Sizes) -> Tensor:
    d, per_group = sizes.head_dim, sizes.heads // sizes.groups
    fused = _linear(x, p, f"{prefix}.linear_qkv").unflatten(-1, (sizes.groups, per_group + 2, d))
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    hidden = distance < 0 if sizes.window is None else (distance < 0) | (distance > sizes.window)
    outputs = []
    for head in range(sizes.heads):
        group, place = divmod(head, per_group)
        q, k, v = (fused[:, group, row] for row in (place, per_group, per_group + 1))
        if sizes.llama:
            q, k = _rotate(q, sizes.rotary_base), _rotate(k, sizes.rotary_base)
        scores = (q @ k.t() / math.sqrt(d)).masked_fill(hidden, -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    return _linear(torch.cat(outputs, -1), p, f"{prefix}.linear_proj")


def _rotate(x: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] * base ** (-torch.arange(half) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def _mlp(x: Tensor, p: dict[str, Tensor], prefix: str, sizes: Sizes) -> Tensor:
    if not sizes.llama:
        hidden = F.gelu(_linear(x, p, f"{prefix}.linear_fc1"), approximate="tanh")
        return _linear(hidden, p, f"{prefix}.linear_fc2")
    gate, up = p[f"{prefix}.linear_fc1.weight"]
    return _linear(F.silu(x @ gate.t()) * (x @ up.t()), p, f"{prefix}.linear_fc2")
