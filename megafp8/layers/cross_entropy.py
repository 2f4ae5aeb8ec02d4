"""Vocabulary-parallel cross entropy: the full logits are never gathered nor kept in fp32."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.parallel.collectives import CommGroup

CHUNK = 128  # rows whose fp32 logits are alive at a time: 128 x 8192 fp32 fits a CPU's L2 cache
GPU_CHUNK = 4096  # on a GPU as many as keep launches few


def _chunk(logits: Tensor) -> int:
    return CHUNK if logits.device.type == "cpu" else GPU_CHUNK


class _CrossEntropyFunction(torch.autograd.Function):
    """loss = logsumexp(logits) - logits[label] per token.

    Two all-reduces over tp: the maximum, then (sum of exponentials, label logit) together.
    Backward writes softmax - onehot chunk by chunk in the dtype of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: CommGroup, vocab_size: int) -> Tensor:
        rows, width = logits.shape
        first = tp.rank * width
        valid = min(max(vocab_size - first, 0), width)  # columns that are not padding
        local = labels - first
        mine = (local >= 0) & (local < valid)
        picked = local.clamp(0, width - 1)
        top = logits.new_full((rows,), -torch.inf, dtype=torch.float32)
        if valid:
            top = logits[:, :valid].amax(-1).float()
        tp.all_reduce(top, "tp_all_reduce", dist.ReduceOp.MAX)
        sums = torch.zeros(2, rows, dtype=torch.float32, device=logits.device)
        if valid:
            chunk = _chunk(logits)
            for start in range(0, rows, chunk):
                part = slice(start, start + chunk)
                # A copy also where the logits are fp32: they are saved for the backward.
                shifted = logits[part, :valid].to(torch.float32, copy=True).sub_(top[part, None])
                sums[1, part] = shifted.gather(1, picked[part, None].clamp(max=valid - 1)).squeeze(
                    1
                )
                sums[0, part] = shifted.exp_().sum(-1)
            sums[1].mul_(mine)
        tp.all_reduce(sums, "tp_all_reduce")
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, picked, mine, top + log_sum)
        ctx.valid = valid
        return log_sum - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, picked, mine, log_total = ctx.saved_tensors
        valid = ctx.valid
        dlogits = torch.empty_like(logits)
        dlogits[:, valid:] = 0.0
        rows = logits.shape[0]
        chunk = _chunk(logits)
        for start in range(0, rows if valid else 0, chunk):
            part = slice(start, start + chunk)
            probability = logits[part, :valid].to(torch.float32, copy=True)
            probability.sub_(log_total[part, None]).exp_()
            probability.mul_(grad[part, None])
            onehot = (grad[part] * mine[part]).neg()[:, None]
            probability.scatter_add_(1, picked[part, None].clamp(max=valid - 1), onehot)
            dlogits[part, :valid] = probability
        return dlogits, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: CommGroup, vocab_size: int
) -> Tensor:
    """Per-token loss in nats.

    Args:
        logits: [..., padded_vocab/tp], this rank's columns.
        labels: int64 [...], global token ids in [0, vocab_size).
        tp: the tensor-parallel group that splits the vocabulary.
        vocab_size: columns from here up are padding and left out of the softmax.

    Returns:
        fp32 [...], equal on all tp ranks.
    """
    flat = _CrossEntropyFunction.apply(logits.flatten(0, -2), labels.flatten(), tp, vocab_size)
    return flat.view(labels.shape)
