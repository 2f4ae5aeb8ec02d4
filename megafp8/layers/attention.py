"""Self-attention: fused QKV, rotary positions, grouped queries, core, output projection."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafp8.layers.backend import Backend, CoreOptions, LayerContext, LinearOptions
from megafp8.layers.dropout import MicroBatchKey
from megafp8.layers.rope import Rope


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
        recompute_core: recompute the core in backward (selective recompute).
        core_fp8: whether the core's products run in FP8.
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
    core_fp8: bool = False

    @property
    def qkv(self) -> LinearOptions:
        """The projection to queries, keys and values."""
        return LinearOptions(f"{self.prefix}.linear_qkv", "column", self.fp8[0], self.qkv_bias)

    @property
    def core(self) -> CoreOptions:
        """The attention core."""
        return CoreOptions(
            f"{self.prefix}.core_attention",
            self.num_heads,
            self.num_groups,
            self.head_dim,
            self.dropout,
            self.window_left,
            self.core_fp8,
        )


class SelfAttention(nn.Module):
    """[s(/tp), b, h] -> [s(/tp), b, h]; heads are split over tp by KV group.

    Args:
        context: what the layers of the stage share.
        backend: makes its layers.
        options: of this layer.
        rope: rotary tables or None.
        linear_qkv: the projection, where it is made together with the norm before it.
    """

    def __init__(
        self,
        context: LayerContext,
        backend: Backend,
        options: AttentionOptions,
        rope: Rope | None,
        linear_qkv: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.options, self.rope = options, rope
        prefix = options.prefix
        proj = LinearOptions(f"{prefix}.linear_proj", "row", options.fp8[1], options.output_bias)
        self.linear_qkv = linear_qkv or backend.linear(context, options.qkv)
        self.linear_proj = backend.linear(context, proj)
        self.q_layernorm = self.k_layernorm = None
        if options.norm is not None:
            self.q_layernorm = backend.norm(context, f"{prefix}.q_layernorm", *options.norm)
            self.k_layernorm = backend.norm(context, f"{prefix}.k_layernorm", *options.norm)
        self.core_attention = backend.attention_core(context, options.core)
        self._recompute_contexts = backend.recompute_contexts
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
        if self.options.recompute_core and torch.is_grad_enabled():
            # Dropout replays by its key; torch's default generator is not used.
            core = checkpoint(
                self.core_attention,
                q,
                k,
                v,
                key,
                use_reentrant=False,
                context_fn=self._recompute_contexts,
                preserve_rng_state=False,
            )
        else:
            core = self.core_attention(q, k, v, key)
        return self.linear_proj(core)
