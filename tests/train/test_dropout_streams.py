"""Which ranks, steps and micro-batches share dropout masks, recorded while a model trains.

Masks of hidden states are recorded where they are drawn. Those of attention are drawn inside SDPA:
they are read off by calling it once more with the same generator, equal scores and the identity as
values, so what is recorded is what was applied.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import megafp8.layers.dropout as dropout
import megafp8.layers.native.attention_core as attention
from megafp8.train.state import TrainState
from tests.model.small import (
    VOCAB,
    assert_same_bytes,
    micro_batches,
    one_rank,  # noqa: F401
    small_config,
    start_run,
)
from tests.support.states import load_state, save_state

# Hidden states of 64 x 2 x 80 = 10 240 elements; attention of 2 x 4 x 64 x 65 / 2 = 16 640 weights.
SIZES = {
    "num_layers": 1,
    "seq_length": 64,
    "hidden_size": 80,
    "kv_channels": 8,
    "ffn_hidden_size": 32,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "hidden_dropout": 0.5,
    "attention_dropout": 0.5,
}
STEPS = 4
TP2 = {"tensor_model_parallel_size": 2}


class Recorder:
    """Masks in the order in which they were drawn, packed to bits."""

    def __init__(self) -> None:
        self.hidden: list[np.ndarray] = []
        self.attention: list[np.ndarray] = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        draw, attend = dropout.dropout_mask, F.scaled_dot_product_attention

        def hidden_mask(*args: Any) -> Tensor:
            kept = draw(*args)
            self.hidden.append(np.packbits(kept.numpy()))
            return kept

        def attend_and_note(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            # Before the call that counts: a recompute is broken off inside it.
            state, length = torch.get_rng_state(), q.shape[2]
            eye = torch.eye(length).expand(*q.shape[:2], length, length)
            weights = attend(torch.zeros(q.shape), torch.zeros(k.shape), eye, *args, **kwargs)
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            self.attention.append(np.packbits((weights[..., seen] != 0).numpy()))
            torch.set_rng_state(state)
            return attend(q, k, v, *args, **kwargs)

        with (
            mock.patch.object(dropout, "dropout_mask", hidden_mask),
            mock.patch.object(attention.F, "scaled_dot_product_attention", attend_and_note),
        ):
            yield


def recorded(
    save: str | None = None, load: str | None = None, extra_draw: bool = False, **changes: Any
) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]], list[float]]:
    """Hidden masks, attention masks (per step) and losses of steps 1-4, or 3-4 after `load`."""
    config = small_config(**{**SIZES, **changes})
    run = start_run(config)
    state = TrainState()
    if load is not None:
        path = Path(load) / "iter_0000002"
        state = load_state(path, run.step)
        assert state.iteration == 2
    hidden, weights, losses = [], [], []
    for iteration in range(state.iteration, STEPS):
        recorder = Recorder()
        if extra_draw and run.mesh.tp_rank == 0:
            torch.rand(1)
        with recorder.attached():
            losses += [result.loss for result in run.train(range(iteration, iteration + 1))]
        hidden.append(recorder.hidden)
        weights.append(recorder.attention)
        if save is not None and iteration == 1:
            position = TrainState(2, 2 * SIZES["global_batch_size"])
            save_state(Path(save), position, run.step, VOCAB)
    return hidden, weights, losses


def agreement(first: np.ndarray, second: np.ndarray) -> float:
    assert first.shape == second.shape and first.size * 8 > 5_000
    return float((np.unpackbits(first) == np.unpackbits(second)).mean())


def assert_independent(first: np.ndarray, second: np.ndarray) -> None:
    assert abs(agreement(first, second) - 0.5) < 0.03


def flat(steps: list[list[np.ndarray]]) -> list[np.ndarray]:
    return [masks for step in steps for masks in step]


def assert_equal_masks(first: list[list[np.ndarray]], second: list[list[np.ndarray]]) -> None:
    assert len(flat(first)) == len(flat(second)) > 0
    assert all(np.array_equal(a, b) for a, b in zip(flat(first), flat(second), strict=True))


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    """Steps 1-4 at TP 2 x DP 2, sequence parallelism off and on, with a checkpoint at step 2."""
    folders = {sp: tmp_path_factory.mktemp(f"sp_{sp}") for sp in (False, True)}
    return {
        sp: (folder, ranks.run(recorded, save=str(folder), sequence_parallel=sp, **TP2))
        for sp, folder in folders.items()
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_who_shares_masks(uninterrupted, sequence_parallel):
    """World ranks 0, 1 are one tensor-parallel group, 2, 3 the other data-parallel rank's."""
    answers = uninterrupted[sequence_parallel][1]
    hidden, weights = [[flat(answer[kind]) for answer in answers] for kind in (0, 1)]
    # Per step one micro-batch: embedding, attention output, MLP output; one attention core.
    assert [len(masks) for masks in hidden] == [3 * STEPS] * 4
    assert [len(masks) for masks in weights] == [STEPS] * 4
    for group in ((0, 1), (2, 3)):
        for first, second in zip(hidden[group[0]], hidden[group[1]], strict=True):
            if sequence_parallel:
                assert_independent(first, second)
            else:
                assert np.array_equal(first, second)
        for first, second in zip(weights[group[0]], weights[group[1]], strict=True):
            assert_independent(first, second)
    for kind in (hidden, weights):
        for first, second in zip(kind[0], kind[2], strict=True):
            assert_independent(first, second)
        for masks in kind:  # steps and sites
            for place in range(1, len(masks)):
                assert_independent(masks[0], masks[place])
    rate = np.unpackbits(hidden[0][0]).mean()
    assert abs(rate - 0.5) < 0.03


def test_losses_agree_inside_a_tensor_parallel_group(uninterrupted):
    """All ranks see one loss: out-of-step masks in the replicated region would show here."""
    for _, answers in uninterrupted.values():
        assert all(answer[2] == answers[0][2] for answer in answers)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_extra_draw_on_one_rank_changes_nothing(ranks, uninterrupted, sequence_parallel):
    answers = ranks.run(recorded, extra_draw=True, sequence_parallel=sequence_parallel, **TP2)
    for found, wanted in zip(answers, uninterrupted[sequence_parallel][1], strict=True):
        assert_equal_masks(found[0], wanted[0])
        assert_equal_masks(found[1], wanted[1])
        assert found[2] == wanted[2]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_resumed_run_draws_the_masks_of_its_iteration(ranks, uninterrupted, sequence_parallel):
    folder, whole = uninterrupted[sequence_parallel]
    resumed = ranks.run(recorded, load=str(folder), sequence_parallel=sequence_parallel, **TP2)
    for found, wanted in zip(resumed, whole, strict=True):
        assert_equal_masks(found[0], wanted[0][2:])
        assert_equal_masks(found[1], wanted[1][2:])
        assert found[2] == wanted[2][2:]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("granularity, hidden", [("full", 10), ("selective", 6)])
def test_recompute_replays_the_masks(granularity, hidden):
    """Per step two micro-batches of three masks, of which a recomputed block draws two again."""
    plain, again = recorded(), recorded(recompute_granularity=granularity)
    for kind, counts in ((0, (6, hidden)), (1, (2, 4))):
        for before, after in zip(plain[kind], again[kind], strict=True):
            assert (len(before), len(after)) == counts
            assert {mask.tobytes() for mask in after} == {mask.tobytes() for mask in before}
    assert again[2] == plain[2]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute_with_dropout_changes_no_bit(granularity):
    runs = [
        start_run(small_config(hidden_dropout=0.3, attention_dropout=0.3, **changes))
        for changes in ({}, {"recompute_granularity": granularity})
    ]
    assert runs[0].train(range(2)) == runs[1].train(range(2))
    assert_same_bytes(runs[0].state(), runs[1].state())


@pytest.mark.usefixtures("one_rank")
def test_micro_batches_have_masks_of_their_own():
    hidden = recorded()[0][0]
    assert len(hidden) == 2 * 3
    for site in range(3):
        assert_independent(hidden[site], hidden[3 + site])


@pytest.mark.usefixtures("one_rank")
def test_seeds_of_micro_batches():
    run = start_run(small_config())
    seeds = [int(batch["seed"]) for i in range(3) for batch in micro_batches(run, i)]
    assert len(set(seeds)) == len(seeds) == 12
    other = start_run(small_config(seed=99))
    assert not set(seeds) & {int(batch["seed"]) for batch in micro_batches(other, 0)}


def seeds_by_rank(**changes: Any) -> list[int]:
    run = start_run(small_config(**changes))
    return [int(batch["seed"]) for batch in micro_batches(run, 0)]


def test_seeds_differ_by_data_parallel_rank_alone(ranks):
    answers = ranks.run(seeds_by_rank, **TP2)
    assert answers[0] == answers[1] and answers[2] == answers[3]
    assert not set(answers[0]) & set(answers[2])
    stages = ranks.run(seeds_by_rank, world_size=2, pipeline_model_parallel_size=2)
    assert stages[0] == stages[1]
