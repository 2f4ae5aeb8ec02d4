"""Dropout on hidden states: keep rate, gradient, and which streams are equal."""

import pytest
import torch

from megafp8.layers.dropout import MicroBatchKey, dropout, micro_batch_seed


def key(
    seed: int = 7, tp_rank: int = 0, sequence_parallel: bool = False, training: bool = True
) -> MicroBatchKey:
    return MicroBatchKey(seed, tp_rank, sequence_parallel, training)


def mask(which: MicroBatchKey, site: str = "here", p: float = 0.5) -> torch.Tensor:
    return dropout(torch.ones(100, 10, 10), p, which, site) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_and_size(p):
    x = torch.full((200, 20, 10), 3.0)
    y = dropout(x, p, key(), "here")
    kept = y != 0
    # 40 000 draws: four standard deviations are at most 0.01.
    assert abs(kept.float().mean() - (1 - p)) < 0.01
    assert torch.allclose(y[kept], torch.tensor(3.0 / (1 - p)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_takes_the_mask_of_the_forward(dtype):
    x = torch.randn(50, 4, 10).to(dtype).requires_grad_(True)
    y = dropout(x, 0.3, key(), "here")
    grad = torch.randn(50, 4, 10).to(dtype)
    y.backward(grad)
    kept = dropout(torch.ones(50, 4, 10), 0.3, key(), "here") != 0
    assert x.grad is not None and x.grad.dtype == y.dtype == dtype
    assert torch.equal(y != 0, kept) and torch.equal(x.grad != 0, kept)
    assert torch.allclose(x.grad, grad * kept / 0.7, rtol=2**-7)


def test_identity_without_training_or_rate():
    x = torch.randn(3, 2, 4)
    assert dropout(x, 0.0, key(), "here") is x
    assert dropout(x, 0.5, key(training=False), "here") is x


def test_streams():
    base = mask(key())
    assert torch.equal(base, mask(key()))
    assert torch.equal(base, mask(key(tp_rank=1))), "whole hidden states need one mask"
    split = [mask(key(tp_rank=rank, sequence_parallel=True)) for rank in (0, 1)]
    others = [mask(key(seed=8)), mask(key(), site="there"), split[0]]
    for first, second in [*((base, other) for other in others), (split[0], split[1])]:
        assert abs((first == second).float().mean() - 0.5) < 0.03  # 10 000 elements


def test_default_generator_is_neither_read_nor_moved():
    state = torch.get_rng_state()
    first = mask(key())
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert torch.equal(mask(key()), first)


def test_every_part_of_a_micro_batch_names_its_seed():
    base = (1234, 3, 2, 1)
    seeds = {micro_batch_seed(*base)}
    for place in range(4):
        changed = list(base)
        changed[place] += 1
        seeds.add(micro_batch_seed(*changed))
    assert len(seeds) == 5
    # A stored value: the masks of an old run can be drawn again.
    assert micro_batch_seed(1234, 0, 0, 0) == 867721820275703507
