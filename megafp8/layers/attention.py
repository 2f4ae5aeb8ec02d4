"""Self-attention: fused QKV, rotary positions, grouped queries, SDPA core, output projection."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafp8.layers.backend import Backend, LayerContext, LinearOptions
from megafp8.layers.dropout import MicroBatchKey
from megafp8.layers.rope import Rope
from megafp8.parallel.rng import default_generator_seeded


@dataclass(frozen=True)
class AttentionOptions:
    """Sizes and switches of one attention layer.

    Attributes:
        prefix: canonical name, "decoder.layers.N.self_attention".
        num_heads, num_groups, head_dim: global sizes; groups are KV heads.
        fp8: whether linear_qkv and linear_proj run in FP8.
        qkv_bias, output_bias: biases.
        norm: (kind, epsilon) of the query and key norms, or None.
        dropout: probability on attention weights.
        window_left: earlier positions that a query sees beside itself; None for all of them.
        recompute_core: recompute the SDPA core in backward (selective recompute).
    """

    prefix: str
    num_heads: int
    num_groups: int
    head_dim: int
    fp8: tuple[bool, bool]
    qkv_bias: bool
    output_bias: bool
    norm: tuple[str, float] | None
    dropout: float
    window_left: int | None
    recompute_core: bool


class SelfAttention(nn.Module):
    """[s(/tp), b, h] -> [s(/tp), b, h]; heads are split over tp by KV group."""

    def __init__(
        self, context: LayerContext, backend: Backend, options: AttentionOptions, rope: Rope | None
    ) -> None:
        super().__init__()
        self.options, self.rope = options, rope
        prefix = options.prefix
        qkv = LinearOptions(f"{prefix}.linear_qkv", "column", options.fp8[0], options.qkv_bias)
        proj = LinearOptions(f"{prefix}.linear_proj", "row", options.fp8[1], options.output_bias)
        self.linear_qkv = backend.linear(context, qkv)
        self.linear_proj = backend.linear(context, proj)
        self.q_layernorm = self.k_layernorm = None
        if options.norm is not None:
            self.q_layernorm = backend.norm(context, f"{prefix}.q_layernorm", *options.norm)
            self.k_layernorm = backend.norm(context, f"{prefix}.k_layernorm", *options.norm)
        self.groups = options.num_groups // context.mesh.tp.size
        self.queries_per_group = options.num_heads // options.num_groups

    def forward(self, x: Tensor, key: MicroBatchKey) -> Tensor:
        """Attend causally over the sequence."""
        qkv = self.linear_qkv(x)  # [s, b, groups * (q/group + 2) * d]
        s, b, _ = qkv.shape
        d, per_group = self.options.head_dim, self.queries_per_group
        qkv = qkv.view(s, b, self.groups, per_group + 2, d)
        q = qkv[..., :per_group, :].reshape(s, b, self.groups * per_group, d)
        k, v = qkv[..., per_group, :], qkv[..., per_group + 1, :]  # [s, b, groups, d]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        if self.rope is not None:
            q, k = self.rope.apply(q), self.rope.apply(k)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, heads, s, d]
        if self.options.recompute_core and torch.is_grad_enabled():
            core = checkpoint(
                self._core, q, k, v, key, use_reentrant=False, preserve_rng_state=False
            )
        else:
            core = self._core(q, k, v, key)
        # [b, heads, s, d] -> [s, b, heads * d]
        return self.linear_proj(core.permute(2, 0, 1, 3).reshape(s, b, -1))

    def _core(self, q: Tensor, k: Tensor, v: Tensor, key: MicroBatchKey) -> Tensor:
        # On a GPU the kernels share K and V; on CPU copies are faster than SDPA's own expansion.
        grouped = self.queries_per_group > 1 and q.device.type != "cpu"
        if self.queries_per_group > 1 and not grouped:
            k = k.repeat_interleave(self.queries_per_group, dim=1)
            v = v.repeat_interleave(self.queries_per_group, dim=1)
        mask = None
        if self.options.window_left is not None:
            mask = window_mask(q.shape[2], self.options.window_left, q.device)
        p = self.options.dropout if key.training else 0.0
        if p == 0.0:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        with default_generator_seeded(key.local(f"{self.options.prefix}.core"), q.device):
            return F.scaled_dot_product_attention(
                q, k, v, mask, p, is_causal=mask is None, enable_gqa=grouped
            )


def window_mask(length: int, left: int, device: torch.device) -> Tensor:
    """Mask [s, s], bool, True where query i may see key j: i - left <= j <= i."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance <= left)
