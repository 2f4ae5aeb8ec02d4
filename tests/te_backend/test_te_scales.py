"""Scales and histories of TE's linears are the native ones, bit for bit."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.layers import LinearOptions
from megafp8.layers.native import NativeBackend
from megafp8.numerics import compute_amax
from tests.model.small import FP8, GPT2, LLAMA, layer_context, registry_state, small_config
from tests.support import te_cpu
from tests.support.layouts import PARITY, SP, degrees
from tests.support.limits import slow
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL, train

NAMES = {
    "column": "decoder.layers.0.self_attention.linear_qkv",
    "row": "decoder.layers.0.mlp.linear_fc2",
    "fused halves": "decoder.layers.0.mlp.linear_fc1",
}
STEPS, MICRO_BATCHES = 20, 2
MICRO_BATCH = ("--fp8-amax-window", "micro-batch")


def recorded(name: str, features: tuple[int, int]) -> list[list[tuple[Tensor, Tensor]]]:
    """Inputs and output gradients by step and micro-batch, of sizes that move by powers of ten."""
    generator = torch.Generator().manual_seed(len(name))
    tokens, (size_in, size_out) = (16, 2), features
    steps: list[list[tuple[Tensor, Tensor]]] = []
    for step in range(STEPS):
        batches = []
        for number in range(MICRO_BATCHES):
            scale = 10.0 ** ((step * 7 + number * 3) % 5 - 2)
            x = torch.randn(*tokens, size_in, generator=generator) * scale
            dy = torch.randn(*tokens, size_out, generator=generator) * scale * 1e-3
            batches.append((x.bfloat16(), dy.bfloat16()))
        steps.append(batches)
    steps[3][1][0].zero_()  # a tensor of zeros leaves no entry
    steps[6][0][0][0, 0, 0] = torch.inf
    return steps


def states(te: bool, name: str, flags: dict[str, Any]) -> list[dict[str, Tensor]]:
    """The whole scale state after each step of one linear fed with recorded tensors."""
    native_gemm = True
    if te:
        te_cpu.load(native_gemm)
        from megafp8.layers.transformer_engine.backend import TransformerEngineBackend
    model = GPT2 if name != "fused halves" else LLAMA
    config = small_config(model, **{**FP8, "disable_bias_linear": True, **flags})
    context = layer_context(config)
    backend: Any = TransformerEngineBackend(context.recipe, context.mesh) if te else NativeBackend()
    mode = "row" if name == "row" else "column"
    linear = backend.linear(context, LinearOptions(NAMES[name], mode, True, False))
    linear.to(torch.bfloat16)  # as FSDP hands it over
    registry = context.registry
    assert registry is not None
    registry.finalize("cpu")
    weight = linear.weight.to_local().flatten(0, -2)
    found = []
    for batches in recorded(name, (weight.shape[1], weight.shape[0])):
        for x, dy in batches:
            leaf = x.clone().requires_grad_(True)
            with backend.scope():
                y = linear(leaf)
            y.backward(dy)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.mul_(1.1)
                parameter.grad = None
        if registry.recipe.weight_amax == "updated":
            index = registry.index_of(NAMES[name], "weight")
            registry.record(index, compute_amax(linear.weight.to_local()))
        registry.update()
        found.append(registry_state(registry))
    return found


CASES = [
    {},
    {"fp8_amax_history_len": 4, "fp8_margin": 1},
    {"fp8_amax_compute_algo": "most_recent", "fp8_nonfinite_amax": "freeze"},
    {"fp8_amax_compute_algo": "quantile:0.5", "fp8_weight_amax": "cast"},
    {"fp8_amax_compute_algo": "trimmed_max:1"},
    {"fp8_amax_compute_algo": "ema:0.9", "fp8_weight_amax": "cast"},
]


@pytest.mark.parametrize("flags", CASES, ids=lambda flags: "-".join(map(str, flags.values())))
def test_every_step_of_a_module(ranks: Ranks, te_ranks: Ranks, flags: dict[str, Any]) -> None:
    for name in NAMES:
        wanted = ranks.run(states, world_size=1, te=False, name=name, flags=flags)[0]
        found = te_ranks.run(states, world_size=1, te=True, name=name, flags=flags)[0]
        assert len(found) == len(wanted) == STEPS
        for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert torch.equal(ours[key], value), (name, step, key)
        # Three roles, moving: the comparison is not one of constants.
        for role in ("input", "weight", "grad_output"):
            key = f"fp8.{NAMES[name]}.{role}.scale"
            assert len({float(state[key]) for state in wanted}) > 1, key


@pytest.mark.parametrize(
    ("size", "flags", "iterations"),
    [slow(1, degrees(), 20), (1, degrees(1, 1, *MICRO_BATCH), 6), (4, degrees(2, 1, SP), 6)],
    ids=["1 rank", "window of micro-batches", "tp2 x fsdp2"],
)
def test_trained_model(
    ranks: Ranks, te_ranks: Ranks, size: int, flags: tuple[str, ...], iterations: int
) -> None:
    """With the native products in the double a whole run is the native run: weights, moments, all.

    Norms are TE's, with the native formula in the double; activation and attention are native.
    """
    command = (*PARITY, *SMALL, *flags, "--attention-backend", "local")
    wanted = ranks.run(train, world_size=size, flags=command, iterations=iterations)
    found = te_ranks.run(
        train, world_size=size, flags=command, iterations=iterations, te=True, native_gemm=True
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.curve.losses == theirs.curve.losses
        assert ours.curve.grad_norms == theirs.curve.grad_norms
        assert ours.after == theirs.after and ours.before != ours.after
        assert sum(name.startswith("fp8.") for name in ours.after) == 2 * 4 * 3 * 2


def test_all_cases_are_distinct() -> None:
    for one, other in itertools.combinations(CASES, 2):
        assert one != other
