"""Dropout from stateless streams, and the key that names one micro-batch's streams."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megafp8.parallel.rng import dropout_mask, stream_seed


@dataclass(frozen=True)
class MicroBatchKey:
    """Names the random streams of one micro-batch on one data-parallel rank.

    Attributes:
        seed: from (run seed, iteration, micro-batch, data-parallel rank).
        tp_rank: this rank's place in the tensor-parallel group.
        sequence_parallel: hidden states are split over tp, so their masks differ per rank.
        training: False switches dropout off.
    """

    seed: int
    tp_rank: int
    sequence_parallel: bool
    training: bool

    def hidden(self, site: str) -> int:
        """Seed for masks on hidden states: equal inside a tp group unless sequence parallel."""
        return stream_seed(self.seed, site, self.tp_rank if self.sequence_parallel else "all")

    def local(self, site: str) -> int:
        """Seed for masks on tensors split over tp (attention heads)."""
        return stream_seed(self.seed, site, self.tp_rank)


def micro_batch_seed(seed: int, iteration: int, micro_batch: int, dp_rank: int) -> int:
    """The number that a `MicroBatchKey` starts from."""
    return stream_seed(seed, "dropout", iteration, micro_batch, dp_rank)


class _DropoutFunction(torch.autograd.Function):
    """y = x * mask / (1 - p); saves the mask as bool, one byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        mask = dropout_mask(x.shape, p, seed, x.device)
        ctx.save_for_backward(mask)
        ctx.factor = 1.0 / (1.0 - p)
        return x * mask * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return grad * mask * ctx.factor, None, None


def dropout(x: Tensor, p: float, key: MicroBatchKey, site: str) -> Tensor:
    """Dropout on a hidden state [s(/tp), b, h]; identity if p is 0 or outside training."""
    if p == 0.0 or not key.training:
        return x
    return _DropoutFunction.apply(x, p, key.hidden(site))
