"""Delayed scaling in TE's way equals a stock te.Linear for 50 random steps, bit for bit.

TE's way: `--fp8-amax-window micro-batch --fp8-nonfinite-amax freeze --fp8-weight-amax cast`. TE's
update runs as the double's port of the fused kernel, or as TE's own Python (`unfused`).
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.layers import LinearOptions
from megafp8.layers.native.linear import NativeLinear
from tests.model.small import GPT2, layer_context, small_config
from tests.support import te_cpu
from tests.support.ranks import Ranks

NAME = "decoder.layers.0.mlp.linear_fc1"
STEPS, MICRO_BATCHES, HISTORY, TOKENS, SIZE = 50, 2, 6, 32, 32
Trace = list[dict[str, Tensor]]


def batches() -> list[tuple[Tensor, Tensor]]:
    """(x, dy) of each micro-batch, of sizes that move at random; some hold a NaN or an inf."""
    generator = torch.Generator().manual_seed(77)
    found = []
    for _ in range(STEPS * MICRO_BATCHES):
        sizes = 10.0 ** (torch.rand(2, generator=generator) * 8 - 4)
        x = torch.randn(TOKENS, SIZE, generator=generator) * sizes[0]
        dy = torch.randn(TOKENS, SIZE, generator=generator) * sizes[1] * 1e-4
        found.append((x.bfloat16(), dy.bfloat16()))
    for number, value in ((9, torch.nan), (30, torch.inf), (61, torch.nan)):
        for tensor in found[number]:
            tensor[number % TOKENS, 3] = value
    return found


def first_weight() -> Tensor:
    generator = torch.Generator().manual_seed(78)
    return (torch.randn(SIZE, SIZE, generator=generator) * 0.1).bfloat16()


def moved_weight(weight: Tensor, number: int) -> None:
    """What stands for the optimizer, after every step."""
    if number % MICRO_BATCHES == MICRO_BATCHES - 1:
        weight.mul_(1.05 if number % 7 else 0.7)


def stock(algorithm: str, margin: int, unfused: bool) -> Trace:
    """The state of te.Linear after each micro-batch."""
    te = te_cpu.load()
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from megafp8.layers.transformer_engine.slots import export_state

    FP8GlobalStateManager.reset()
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = str(int(unfused))
    module = te.Linear(SIZE, SIZE, bias=False, params_dtype=torch.bfloat16, device="cpu")
    module.weight.data.copy_(first_weight())
    recipe = DelayedScaling(
        margin=margin, amax_history_len=HISTORY, amax_compute_algo=algorithm, reduce_amax=False
    )
    trace: Trace = []
    try:
        for number, (x, dy) in enumerate(batches()):
            with te.autocast(enabled=True, recipe=recipe):
                y = module(x.clone().requires_grad_(True))
            y.backward(dy)
            module.weight.grad = None
            trace.append(export_state(module, NAME))
            moved_weight(module.weight.data, number)
    finally:
        del os.environ["NVTE_UNFUSED_FP8_UPDATE"]
    return trace


def native(algorithm: str, margin: int) -> Trace:
    """The state of the native linear after each micro-batch's update."""
    flags: dict[str, Any] = {
        "bf16": True,
        "fp8_format": "hybrid",
        "fp8_amax_history_len": HISTORY,
        "fp8_amax_compute_algo": algorithm,
        "fp8_margin": margin,
        "fp8_amax_window": "micro-batch",
        "fp8_nonfinite_amax": "freeze",
        "fp8_weight_amax": "cast",
    }
    config = small_config(GPT2, hidden_size=SIZE, ffn_hidden_size=SIZE, **flags)
    context = layer_context(config, cache_weights=False)
    linear = NativeLinear(context, LinearOptions(NAME, "column", True, False)).to(torch.bfloat16)
    registry = context.registry
    assert registry is not None
    registry.finalize("cpu")
    weight = linear.weight.data.to_local()
    weight.copy_(first_weight())
    trace: Trace = []
    for number, (x, dy) in enumerate(batches()):
        linear(x.clone().requires_grad_(True)).backward(dy)
        linear.weight.grad = None
        # Weights are cast anew in the backward: their amax is in the same entry.
        registry.update()
        trace.append(registry.tensors())
        moved_weight(weight, number)
    return trace


@pytest.mark.parametrize("unfused", [False, True])
@pytest.mark.parametrize(("algorithm", "margin"), [("max", 0), ("most_recent", 1)])
def test_fifty_steps_equal_stock_te(
    ranks: Ranks, te_ranks: Ranks, algorithm: str, margin: int, unfused: bool
) -> None:
    options = {"algorithm": algorithm, "margin": margin}
    (wanted,) = te_ranks.run(stock, world_size=1, unfused=unfused, **options)
    (found,) = ranks.run(native, world_size=1, **options)
    assert len(found) == len(wanted) == STEPS * MICRO_BATCHES
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.keys() == theirs.keys() and len(ours) == 6
        for key, value in theirs.items():
            if key.endswith(".scale") and unfused:
                # Run eagerly, TE's `fp8_max / amax` is torch's fp8_max * (1 / amax): an ulp away.
                torch.testing.assert_close(ours[key], value, rtol=2.0**-22, atol=0.0)
            elif key.endswith(".scale"):
                assert torch.equal(ours[key], value), (number, key)
            else:  # TE keeps one entry less: its newest row waits for the next amax
                assert torch.equal(ours[key][1:], value[1:]), (number, key)
    for role in ("input", "weight", "grad_output"):
        assert len({float(state[f"fp8.{NAME}.{role}.scale"]) for state in found}) > 10, role
