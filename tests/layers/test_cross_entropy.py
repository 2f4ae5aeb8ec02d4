"""Vocabulary-parallel cross entropy against torch's own, in fp64 over the whole vocabulary."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megafp8.layers.cross_entropy import CHUNK, vocab_parallel_cross_entropy
from megafp8.parallel import CommGroup, Traffic

PADDED, SEQUENCE, BATCH = 32, 100, 3
assert SEQUENCE * BATCH > 2 * CHUNK, "several chunks and a shorter last one"


def problem(vocab: int, dtype: torch.dtype, spread: float):
    """Logits [s, b, PADDED] whose padding is NaN, labels, and a weight of each loss."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(SEQUENCE, BATCH, PADDED, generator=generator).mul_(spread).to(dtype)
    logits[..., vocab:] = torch.nan
    labels = torch.randint(0, vocab, (SEQUENCE, BATCH), generator=generator)
    weights = torch.rand(SEQUENCE, BATCH, generator=generator)
    weights[::7] = 0.0  # masked tokens
    return logits, labels, weights


def losses_and_gradient(vocab: int, dtype: torch.dtype, spread: float):
    """This rank's view: per-token losses and the gradient of its columns."""
    logits, labels, weights = problem(vocab, dtype, spread)
    group = CommGroup(dist.group.WORLD, Traffic())
    mine = logits.chunk(group.size, -1)[group.rank].contiguous().requires_grad_(True)
    kept = mine.detach().clone()
    losses = vocab_parallel_cross_entropy(mine, labels, group, vocab)
    (losses * weights).sum().backward()
    assert mine.grad is not None and mine.grad.dtype == dtype and losses.dtype == torch.float32
    assert torch.equal(mine.detach().nan_to_num(), kept.nan_to_num()), "logits were written to"
    return losses.detach(), mine.grad


@pytest.mark.parametrize(
    "vocab, dtype, spread",
    [
        (32, torch.float32, 3.0),  # no padding
        (
            20,
            torch.float32,
            3.0,
        ),  # on 4 ranks of 8 columns: rank 2 half padding, rank 3 nothing else
        (20, torch.float32, 1e4),  # exp of a logit overflows
        (20, torch.bfloat16, 3.0),
        (3, torch.float32, 3.0),  # three ranks of four are padding alone
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_cross_entropy(ranks, size, vocab, dtype, spread):
    answers = ranks.run(
        losses_and_gradient, world_size=size, vocab=vocab, dtype=dtype, spread=spread
    )
    logits, labels, weights = problem(vocab, dtype, spread)
    exact = logits[..., :vocab].double().requires_grad_(True)
    wanted = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none")
    wanted = wanted.view(SEQUENCE, BATCH)
    (wanted * weights.double()).sum().backward()
    for losses, _ in answers:
        assert torch.allclose(losses.double(), wanted, rtol=1e-6, atol=1e-6 * spread)
        assert torch.equal(losses, answers[0][0]), "losses differ between ranks"
    gradient = torch.cat([part for _, part in answers], -1)
    assert not gradient[..., vocab:].any(), "padding gets a gradient"
    tolerance = 1e-6 * spread if dtype == torch.float32 else 2**-8
    assert (gradient[..., :vocab].double() - exact.grad).abs().max() < tolerance
    assert not gradient[::7].any(), "masked tokens get a gradient"
