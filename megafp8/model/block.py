"""One transformer block: pre-norm attention and MLP around a residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafp8.layers.attention import AttentionOptions, SelfAttention
from megafp8.layers.backend import Backend, LayerContext, LinearOptions, NormOptions
from megafp8.layers.dropout import MicroBatchKey, dropout
from megafp8.layers.mlp import Mlp
from megafp8.layers.rope import Rope
from megafp8.parallel.fsdp import change_gather

if TYPE_CHECKING:
    from megafp8.config import RunConfig
    from megafp8.precision import PrecisionPlan


class Block(nn.Module):
    """[s(/tp), b, h] -> [s(/tp), b, h].

    Args:
        context: what the layers of the stage share.
        backend: makes linears and norms.
        config: the run.
        plan: decides which linears are FP8.
        layer: global 0-based layer number.
        rope: rotary tables or None.
        recompute: recompute the whole block in backward (full recompute).
    """

    def __init__(
        self,
        context: LayerContext,
        backend: Backend,
        config: RunConfig,
        plan: PrecisionPlan,
        layer: int,
        rope: Rope | None,
        recompute: bool,
    ) -> None:
        super().__init__()
        model, prefix = config.model, f"decoder.layers.{layer}"
        norm = (model.normalization, model.norm_epsilon)
        self.layer, self.prefix, self.recompute = layer, prefix, recompute
        self.hidden_dropout = model.hidden_dropout
        self._recompute_contexts = backend.recompute_contexts
        attention, mlp = f"{prefix}.self_attention", f"{prefix}.mlp"

        def fp8(*names: str) -> tuple[bool, bool]:
            first, second = (plan.precision(name) == "fp8" for name in names)
            return first, second

        options = AttentionOptions(
            prefix=attention,
            num_heads=model.num_attention_heads,
            num_groups=model.query_groups,
            head_dim=model.head_dim,
            fp8=fp8(f"{attention}.linear_qkv", f"{attention}.linear_proj"),
            qkv_bias=model.qkv_bias,
            output_bias=model.attention_output_bias,
            norm=norm if model.qk_layernorm else None,
            dropout=model.attention_dropout,
            window_left=model.window_left,
            recompute_core=config.training.recompute_granularity == "selective",
            core_fp8=plan.core_is_fp8(layer),
        )
        self.input_layernorm, linear_qkv = backend.norm_linear(
            context, NormOptions(f"{prefix}.input_layernorm", *norm), options.qkv
        )
        self.self_attention = SelfAttention(context, backend, options, rope, linear_qkv)
        precisions = fp8(f"{mlp}.linear_fc1", f"{mlp}.linear_fc2")
        self.pre_mlp_layernorm, linear_fc1 = backend.norm_linear(
            context,
            NormOptions(f"{prefix}.pre_mlp_layernorm", *norm),
            LinearOptions(f"{mlp}.linear_fc1", "column", precisions[0], model.mlp_bias),
        )
        self.mlp = Mlp(
            context,
            backend,
            mlp,
            precisions,
            model.mlp_bias,
            model.swiglu,
            model.activation,
            linear_fc1,
        )

    def forward(self, x: Tensor, key: MicroBatchKey) -> Tensor:
        """Run the block, under activation recompute if it was asked for."""
        if self.recompute and torch.is_grad_enabled():
            # Dropout replays by its key; torch's default generator is not used.
            return checkpoint(
                self._body,
                x,
                key,
                use_reentrant=False,
                context_fn=self._recompute_contexts,
                preserve_rng_state=False,
            )
        return self._body(x, key)

    def _body(self, x: Tensor, key: MicroBatchKey) -> Tensor:
        p = self.hidden_dropout
        y = self.self_attention(self.input_layernorm(x), key)
        x = x + dropout(y, p, key, f"{self.prefix}.self_attention")
        y = self.mlp(self.pre_mlp_layernorm(x))
        return x + dropout(y, p, key, f"{self.prefix}.mlp")

    def switch(self, name: str, plan: PrecisionPlan) -> None:
        """Give a linear of this block the precision that the plan has for it now.

        FSDP's gathers of its weight follow, and the attention core, FP8 only between FP8 linears.
        """
        path = name.removeprefix(f"{self.prefix}.")
        linear: Any = self.get_submodule(path)
        linear.set_precision(plan.precision(name))
        if linear.weight_cast is not None:
            cast = linear.weight_cast if linear.precision == "fp8" else None
            change_gather(self, f"{path}.weight", cast)
        core: Any = self.self_attention.core_attention
        if core.options.fp8:
            core.set_precision("fp8" if plan.core_is_fp8(self.layer) else plan.compute)
