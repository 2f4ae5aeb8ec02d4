"""One pipeline stage of a GPT: embedding, some blocks, final norm, output layer and loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megafp8.config.shape import EMBEDDING, OUTPUT
from megafp8.layers.backend import Backend, LayerContext
from megafp8.layers.cross_entropy import vocab_parallel_cross_entropy
from megafp8.layers.dropout import MicroBatchKey
from megafp8.layers.embedding import Embedding
from megafp8.layers.output_layer import OutputLayer
from megafp8.layers.rope import Rope
from megafp8.model.block import Block

if TYPE_CHECKING:
    from megafp8.config import Layout, RunConfig
    from megafp8.precision import PrecisionPlan


class Decoder(nn.Module):
    """The blocks of a stage, under their global numbers, and the final norm on the last stage."""

    def __init__(self, layers: dict[str, nn.Module], final_layernorm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.final_layernorm = final_layernorm


class GPTStage(nn.Module):
    """Stage `index` of `layout.num_stages`; with one stage, the whole model.

    Parameter names are canonical (Megatron's, global layer numbers) on every stage.
    """

    def __init__(
        self,
        context: LayerContext,
        backend: Backend,
        config: RunConfig,
        plan: PrecisionPlan,
        layout: Layout,
        index: int,
        vocab_size: int,
        rope: Rope | None,
        built: Callable[[nn.Module, str, str], None],
    ) -> None:
        """Build the parts of the stage.

        Args:
            context: what its layers share.
            backend: makes linears and norms.
            config: the run.
            plan: which linears are FP8.
            layout: degrees of parallelism.
            index: of the stage.
            vocab_size: tokens before padding.
            rope: rotary tables or None.
            built: told of each part right after it is built, with the prefix of its parameters'
                names and the kind of its FSDP traffic, so that only one unsharded block is in
                memory at a time.
        """
        super().__init__()
        model, training = config.model, config.training
        self.tp, self.vocab_size = context.mesh.tp, vocab_size
        self.sequence_parallel = context.sequence_parallel
        self._scope = backend.scope
        self.is_first, self.is_last = index == 0, index == layout.num_stages - 1
        self.embedding = None
        if self.is_first:
            learned = model.position_embedding_type == "learned_absolute"
            self.embedding = Embedding(context, learned, model.hidden_dropout)
            built(self.embedding, "embedding.", "other")
        full = training.recompute_granularity == "full"
        # --recompute-num-layers counts blocks of each stage, as Megatron's "block" method does.
        limit = training.recompute_num_layers or layout.layers_per_stage
        blocks: dict[str, nn.Module] = {}
        for position, layer in enumerate(layout.stage_layers(index)):
            recompute = full and position < limit
            block = Block(context, backend, config, plan, layer, rope, recompute)
            built(block, f"{block.prefix}.", "block")
            blocks[str(layer)] = block
        final, self.output_layer = None, None
        if self.is_last:
            norm = (model.normalization, model.norm_epsilon)
            final = backend.norm(context, "decoder.final_layernorm", *norm)
            self.output_layer = OutputLayer(context, EMBEDDING if model.tied_embeddings else OUTPUT)
            built(self.output_layer, "output_layer.", "other")
        self.decoder = Decoder(blocks, final)
        built(self, "", "other")

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        seed: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the stage on one micro-batch.

        Args:
            x: token ids int64 [b, s] on the first stage, else the boundary tensor [s(/tp), b, h].
            position_ids: int64 [b, s].
            seed: int64 [1] on the CPU, names the micro-batch's dropout streams.
            labels: int64 [b, s]; without them the last stage gives logits.
            loss_mask: fp32 [b, s].

        Returns:
            Boundary tensor [s(/tp), b, h]; on the last stage the sum of masked token losses as
            fp32 [1], or logits [s, b, padded_vocab/tp].
        """
        key = MicroBatchKey(int(seed), self.tp.rank, self.sequence_parallel, self.training)
        if self.embedding is not None:
            x = self.embedding(x, position_ids, key)
        with self._scope():
            for block in self.decoder.layers.values():
                x = block(x, key)
        if self.decoder.final_layernorm is None or self.output_layer is None:
            return x
        logits = self.output_layer(self.decoder.final_layernorm(x))  # [s, b, v/tp]
        if labels is None or loss_mask is None:
            return logits
        losses = vocab_parallel_cross_entropy(logits, labels.t(), self.tp, self.vocab_size)
        return (losses * loss_mask.t()).sum(0).sum(0, keepdim=True)

    @torch.no_grad()
    def full_logits(self, logits: Tensor) -> Tensor:
        """[s, b, padded_vocab/tp] -> [s, b, vocab], gathered over tp: for sampling and tests."""
        rows = logits.permute(2, 0, 1)  # the vocabulary first, since gathers concatenate dim 0
        full = self.tp.all_gather(rows, "tp_other_all_gather")
        return full[: self.vocab_size].permute(1, 2, 0)
