"""Vocabulary-parallel word embedding, with learned absolute positions if asked."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megafp8.layers.backend import LayerContext
from megafp8.layers.dropout import MicroBatchKey, dropout
from megafp8.parallel.collectives import reduce_from_group, scatter_sequence


class _LookupFunction(torch.autograd.Function):
    """Rows of this rank's part of the table; ids of other ranks give zeros.

    The gradient is summed in fp32: a frequent token adds thousands of rows, and a BF16 sum stops
    growing once it is 256 times its addends.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: DTensor, first: int) -> Tensor:
        local = table.to_local()
        rows = ids - first
        outside = (rows < 0) | (rows >= local.shape[0])
        rows = rows.masked_fill(outside, 0)
        ctx.save_for_backward(rows, outside)
        ctx.table, ctx.rows = table, local.shape[0]
        return F.embedding(rows, local).masked_fill_(outside.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, DTensor, None]:
        rows, outside = ctx.saved_tensors
        table = ctx.table
        flat = grad.float().masked_fill(outside.unsqueeze(-1), 0.0).flatten(0, -2)
        # Unlike index_add_, which adds in any order on a GPU, this one is deterministic.
        local = torch.ops.aten.embedding_dense_backward(flat, rows.flatten(), ctx.rows, -1, False)
        return (
            None,
            DTensor.from_local(
                local,
                table.device_mesh,
                table.placements,
                run_check=False,
                shape=table.shape,
                stride=table.stride(),
            ),
            None,
        )


class Embedding(nn.Module):
    """Token ids [b, s] -> hidden states [s(/tp), b, h]."""

    def __init__(
        self, context: LayerContext, learned_positions: bool, hidden_dropout: float
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = context.mesh.tp, context.sequence_parallel
        self.hidden_dropout = hidden_dropout
        self.word_embeddings = nn.Module()
        self.word_embeddings.weight = context.factory("embedding.word_embeddings.weight")
        self.position_embeddings = nn.Module() if learned_positions else None
        if self.position_embeddings is not None:
            self.position_embeddings.weight = context.factory(
                "embedding.position_embeddings.weight"
            )

    def forward(self, tokens: Tensor, position_ids: Tensor, key: MicroBatchKey) -> Tensor:
        """Look up, sum over tp (over s with sequence parallelism), add positions, drop."""
        table: Any = self.word_embeddings.weight
        if table.grad_dtype != torch.float32:  # lets the fp32 gradient through FSDP2
            table.grad_dtype = torch.float32
        first = self.tp.rank * (table.shape[0] // self.tp.size)
        x = _LookupFunction.apply(tokens.t().contiguous(), table, first)  # [s, b, h]
        if self.sequence_parallel:
            x = scatter_sequence(x, self.tp)  # [s/tp, b, h]
        else:
            x = reduce_from_group(x, self.tp)
        if self.position_embeddings is not None:
            positions = position_ids.t()  # [s, b]
            if self.sequence_parallel:
                positions = positions.chunk(self.tp.size)[self.tp.rank]
            weight: Any = self.position_embeddings.weight
            if weight.grad_dtype != torch.float32:
                weight.grad_dtype = torch.float32
            x = x + _LookupFunction.apply(positions, weight, 0)
        return dropout(x, self.hidden_dropout, key, "embedding")
