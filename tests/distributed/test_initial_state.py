"""A layout changes where numbers lie, not which: initial weights, first loss, tied embeddings."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megafp8.config.shape import EMBEDDING, OUTPUT
from tests.support.layouts import (
    CASES,
    PARITY,
    PRECISIONS,
    SP,
    VIRTUAL,
    LayoutCase,
    degrees,
    digest,
    merge_stages,
    reference_case,
    start_training,
)
from tests.support.limits import slow
from tests.support.ranks import Ranks

ZBV = ("--pipeline-schedule", "zbv")
HALF = ("--global-batch-size", "8")  # of the preset's
TIED = ("--untie-embeddings-and-output-weights", "false")
# Other kinds of parameters: learned positions, LayerNorm and linear biases, a plain MLP, qk-norms.
GPT2 = (
    *("--position-embedding-type", "learned_absolute", "--normalization", "LayerNorm"),
    *("--swiglu", "false", "--disable-bias-linear", "false", "--qk-layernorm"),
)
SMALL = [case for case in CASES if case.world_size <= 4]
MIXED = [case for case in SMALL if case.name in ("tp2", "tp2 + sp", "tp2 x pp2", "tp2 x fsdp2")]


def name_of(case: LayoutCase) -> str:
    return case.name.replace(" ", "")


@dataclass
class First:
    """A run's first iteration on one rank: its stages' weights and gradients, and the loss."""

    digests: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    gradients: dict[str, np.ndarray]
    loss: float


def first_iteration(flags: tuple[str, ...]) -> First:
    training = start_training(flags)
    full = training.full_parameters()
    digests = {name: digest(tensor) for name, tensor in full.items()}
    result, gradients = training.step_with_gradients()
    return First(
        digests=digests,
        shapes={name: tuple(tensor.shape) for name, tensor in full.items()},
        gradients={name: tensor.numpy() for name, tensor in gradients.items()},
        loss=result.loss,
    )


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], First]:
    """The first iteration on one rank, by command line."""
    return {}


def compare(
    ranks: Ranks, known: dict[tuple[str, ...], First], case: LayoutCase, more: tuple[str, ...]
) -> None:
    more = (*HALF, *more)
    alone = (*reference_case(case).command("fp32"), *more)
    if alone not in known:
        known[alone] = ranks.run(first_iteration, world_size=1, flags=alone)[0]
    one, command = known[alone], (*case.command("fp32"), *more)
    found = ranks.run(first_iteration, world_size=case.world_size, flags=command)
    assert merge_stages([rank.digests for rank in found]) == one.digests
    assert merge_stages([rank.shapes for rank in found]) == one.shapes
    for rank in found:
        assert math.isclose(rank.loss, one.loss, rel_tol=1e-6), (rank.loss, one.loss)
        for name, gradient in rank.gradients.items():
            wanted = one.gradients[name]
            # The absolute part is for gradients that are zero but for rounding: softmax does not
            # see a bias on all keys. Those of the sum of 1024 token losses are of the order of 1.
            bound = 2e-5 * np.abs(wanted).max() + 1e-6
            assert np.abs(gradient - wanted).max() <= bound, name


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_weights_loss_and_gradients_equal_one_rank(
    ranks: Ranks, known: dict[tuple[str, ...], First], case: LayoutCase
) -> None:
    compare(ranks, known, case, ())


@pytest.mark.parametrize("more", [GPT2, (*GPT2, *TIED)], ids=["untied", "tied"])
@pytest.mark.parametrize("case", MIXED, ids=name_of)
def test_other_kinds_of_parameters(
    ranks: Ranks, known: dict[tuple[str, ...], First], case: LayoutCase, more: tuple[str, ...]
) -> None:
    compare(ranks, known, case, more)


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (1, degrees()),
        (2, degrees(1, 2)),
        (4, degrees(2, 2, SP)),
        (2, degrees(1, 2, *VIRTUAL, "--num-layers", "8")),
        (2, degrees(1, 2, *ZBV)),
    ],
    ids=["one", "pp2", "tp2pp2", "interleaved", "zbv"],
)
@pytest.mark.parametrize("more", [(), TIED], ids=["untied", "tied"])
def test_parameters_over_ranks_are_the_models(
    ranks: Ranks, size: int, flags: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """Every parameter is built, none twice; the copy of a tied embedding is not counted."""
    for total, wanted in ranks.run(count_parameters, world_size=size, flags=(*flags, *more)):
        assert total == wanted


def count_parameters(flags: tuple[str, ...]) -> tuple[int, int]:
    """Elements over all ranks, each on one of them, and the model's."""
    training = start_training((*PARITY, *flags))
    mine = sum(e.shard.numel() for e in training.step.gradients.entries if e.counts)
    total = torch.tensor([mine // training.mesh.layout.replicate], dtype=torch.int64)
    training.mesh.all.all_reduce(total, "grad_norm")
    assert sorted(training.model.specs) == sorted(s.name for s in training.shape.parameters())
    return int(total), training.shape.num_parameters


# ------------------------------------------------------------------------------------------ tied


def embedding_history(flags: tuple[str, ...], iterations: int) -> list[dict[str, str]]:
    """Digests of both ends of a tied embedding and of their moments, after each iteration."""
    training = start_training(flags)
    history = []
    for _ in range(iterations):
        training.one_step()
        ends = {}
        for name, parameter in training.model.parameters.items():
            if name in (EMBEDDING, OUTPUT):
                ends[name] = digest(parameter.data.full_tensor())  # type: ignore[attr-defined]
        history.append(ends)
    return history


@pytest.mark.parametrize(
    ("size", "flags", "iterations"),
    [
        (1, degrees(), 5),
        slow(2, degrees(1, 2), 20),
        (2, degrees(1, 2, *ZBV), 20),
        (4, degrees(2, 2, SP), 5),
        (4, degrees(1, 2), 5),
    ],
    ids=["one", "pp2", "zbv", "tp2pp2", "pp2fsdp2"],
)
def test_tied_embeddings_stay_bit_equal(
    ranks: Ranks, size: int, flags: tuple[str, ...], iterations: int
) -> None:
    command = (*PARITY, *TIED, "--global-batch-size", "8", *flags)
    per_rank = ranks.run(embedding_history, world_size=size, flags=command, iterations=iterations)
    seen = set()
    for iteration in range(iterations):
        held = [rank[iteration] for rank in per_rank]
        first = {ends[EMBEDDING] for ends in held if EMBEDDING in ends}
        last = {ends[OUTPUT] for ends in held if OUTPUT in ends}
        assert first == last and len(first) == 1, f"iteration {iteration + 1}"
        seen |= first
    assert len(seen) == iterations  # and they do change


def tied_curve(flags: tuple[str, ...], iterations: int) -> tuple[list[float], list[float]]:
    curve = start_training(flags).iterate(iterations)
    return curve.losses, curve.grad_norms


@pytest.mark.parametrize(
    ("size", "flags"),
    [(2, degrees(1, 2)), (2, degrees(1, 2, *ZBV)), (4, degrees(2, 2, SP)), (4, degrees(1, 2))],
    ids=["pp2", "zbv", "tp2pp2", "pp2fsdp2"],
)
def test_tied_training_equals_one_rank(ranks: Ranks, size: int, flags: tuple[str, ...]) -> None:
    """The norm counts a tied embedding once, and both of its gradients reach it."""
    base = (*PARITY, *PRECISIONS["fp32"], *TIED, "--global-batch-size", "8")
    wanted = ranks.run(tied_curve, world_size=1, flags=(*base, *degrees()), iterations=3)[0]
    for losses, norms in ranks.run(
        tied_curve, world_size=size, flags=(*base, *flags), iterations=3
    ):
        if size == 2:  # a pipeline alone changes no bit
            assert (losses, norms) == wanted
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert norms == pytest.approx(wanted[1], rel=1e-4)
