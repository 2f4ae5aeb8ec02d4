"""FP8 weights handed to TransformerEngine ready: nothing but the number of casts changes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.evaluation import validation_loss
from megafp8.layers import LinearOptions
from megafp8.numerics import QuantizedTensor, compute_amax, quantize
from tests.model.small import FP8, GPT2, layer_context, small_config
from tests.support import te_cpu
from tests.support.layouts import PARITY, SP, degrees
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL, start_te

NAME = "decoder.layers.0.self_attention.linear_qkv"
RECIPES = ("delayed", "tensorwise")
CAST_AMAX = ("--fp8-weight-amax", "cast")
FP8_LINEARS, MICRO_BATCHES = 8, 4


def run(te_ranks: Ranks, function: Any, **kwargs: Any) -> Any:
    return te_ranks.run(function, world_size=1, **kwargs)[0]


# -------------------------------------------------------------------------------- kept over a step


def trained(flags: tuple[str, ...], keep: bool) -> tuple[list[float], dict[str, str], list[int]]:
    """Losses, final state and casts per step of a run that does or does not keep weights."""
    te_cpu.load()
    from megafp8.layers.transformer_engine import linear
    from tests.support.te_cpu.emulation import CALLS

    former = linear.KeptWeight
    linear.KeptWeight = former if keep else lambda registry: None
    try:
        training = start_te(flags)
    finally:
        linear.KeptWeight = former
    losses, casts = [], []
    for step in range(4):
        CALLS.clear()
        losses += training.iterate(1).losses
        casts.append(sum(CALLS.values()))
        if step == 1:
            validation_loss(training.model, training.loader, training.mesh, 1, 8)
    return losses, training.digests(), casts


@pytest.mark.parametrize(
    ("recipe", "amax"),
    [("delayed", ()), ("delayed", CAST_AMAX), ("tensorwise", ())],
    ids=["delayed", "delayed, amax from the cast", "tensorwise"],
)
def test_kept_weights_change_no_bit(te_ranks: Ranks, recipe: str, amax: tuple[str, ...]) -> None:
    flags = (*PARITY, *SMALL, *degrees(), "--fp8-recipe", recipe, *amax)
    losses, state, casts = run(te_ranks, trained, flags=flags, keep=True)
    wanted, wanted_state, each = run(te_ranks, trained, flags=flags, keep=False)
    assert losses == wanted and state == wanted_state and losses[-1] < losses[0]
    # Input and output gradient in each micro-batch; the weight once, or in each forward and, since
    # under FSDP2 TE saves no FP8 weight, in each backward.
    assert casts == [FP8_LINEARS * (2 * MICRO_BATCHES + 1)] * 4
    assert each == [FP8_LINEARS * 4 * MICRO_BATCHES] * 4


def test_kept_weights_on_four_ranks(te_ranks: Ranks) -> None:
    flags = (*PARITY, *SMALL, *degrees(2, 1, SP), "--reshard-after-forward=false")
    kept = te_ranks.run(trained, world_size=4, flags=flags, keep=True)
    cast = te_ranks.run(trained, world_size=4, flags=flags, keep=False)
    for ours, theirs in zip(kept, cast, strict=True):
        assert ours[:2] == theirs[:2] and ours[2] < theirs[2]


def recomputed(flags: tuple[str, ...], keep: bool) -> tuple[list[float], dict[str, str], list[int]]:
    return trained((*flags, "--recompute-granularity", "full"), keep)


def test_kept_weights_with_recompute(te_ranks: Ranks) -> None:
    flags = (*PARITY, *SMALL, *degrees())
    kept = run(te_ranks, recomputed, flags=flags, keep=True)
    plain = run(te_ranks, trained, flags=flags, keep=False)
    assert kept[:2] == plain[:2]


# ------------------------------------------------------------------------------------- from codes


class Gathered(torch.Tensor):
    """A weight that a gather brought as codes: no values, a gradient of its own dtype."""

    held: QuantizedTensor

    @staticmethod
    def __new__(cls, held: QuantizedTensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, held.data.shape, dtype=torch.bfloat16, device="cpu"
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func}: the values are not there")

    def quantized(self) -> QuantizedTensor:
        return self.held


def both_ways(recipe: str, refill: bool, keep: bool) -> dict[str, Any]:
    """One linear, from a BF16 weight that TE casts and from codes of the same cast."""
    te_cpu.load()
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    from megafp8.layers.transformer_engine.backend import TransformerEngineBackend
    from tests.support.te_cpu.emulation import CALLS

    flags = {**FP8, "fp8_amax_history_len": None, "fp8_recipe": recipe, "disable_bias_linear": True}
    config = small_config(GPT2, transformer_impl="transformer_engine", **flags)
    context = layer_context(config, cache_weights=keep)
    backend = TransformerEngineBackend(context.recipe, context.mesh)
    linear: Any = backend.linear(context, LinearOptions(NAME, "column", True, False))
    linear.to(torch.bfloat16)
    registry = context.registry
    assert registry is not None
    registry.finalize("cpu")
    if len(registry):
        registry.scale.fill_(8.0)
        torch.reciprocal(registry.scale, out=registry.scale_inv)
    weight = linear.weight.to_local().detach()
    weight[0, 0] = 0.4375  # the amax: its scale is 1024, so both ways have one scale_inv to the bit
    torch.manual_seed(1)
    batches = [torch.randn(16, 2, weight.shape[1]).bfloat16() for _ in range(2)]

    def passes(free: Any = None) -> tuple[list[Tensor], Tensor, dict[str, int]]:
        CALLS.clear()
        results, total = [], torch.zeros(weight.shape)
        for x in batches:
            leaf = x.clone().requires_grad_(True)
            with backend.scope():
                y = linear(leaf)
            if free is not None:
                free()
            y.float().square().sum().backward()
            results += [y.detach(), leaf.grad]
            total += gradient()
        return results, total, dict(CALLS)

    def gradient() -> Tensor:
        found, leaf.grad = leaf.grad, None
        return (found.to_local() if hasattr(found, "to_local") else found).float()

    leaf: Any = linear.weight
    cast_inside = passes()
    fmt = registry.recipe.format("weight")
    if len(registry):
        scale = registry.scale_of(registry.index_of(NAME, "weight")).clone()
    else:
        scale = fmt.max / compute_amax(weight)
    codes = quantize(weight, scale, fmt)
    saved = codes.view(torch.uint8).clone()
    leaf = Gathered(QuantizedTensor(codes, 1 / scale, fmt)).requires_grad_(True)
    linear._get_weight_tensors = lambda: [leaf]
    registry.version += 1

    def free_and_fill() -> None:
        """What FSDP2 does with the memory of a gathered weight between the passes."""
        storage = codes.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        codes.view(torch.uint8).copy_(saved)

    from_codes = passes(free_and_fill if refill else None)
    seen: list[Any] = []
    original = te_linear_forward_weight(seen)
    with backend.scope():
        linear(batches[0].clone().requires_grad_(True))
    original()
    return {
        "equal": [torch.equal(a, b) for a, b in zip(cast_inside[0], from_codes[0], strict=True)],
        "gradient": torch.equal(cast_inside[1], from_codes[1]) and bool(from_codes[1].any()),
        "casts": (sum(cast_inside[2].values()), sum(from_codes[2].values())),
        "no copy": isinstance(seen[0], Float8Tensor)
        and seen[0]._data.data_ptr() == codes.data_ptr(),
    }


def te_linear_forward_weight(seen: list[Any]) -> Any:
    """Note the weights that TE's function gets; returns what undoes it."""
    from transformer_engine.pytorch.module import linear as te_linear

    former = te_linear._linear_eager

    def noting(weight: Any, *args: Any) -> Any:
        seen.append(weight)
        return former(weight, *args)

    te_linear._linear_eager = noting

    def undo() -> None:
        te_linear._linear_eager = former

    return undo


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_codes_are_the_cast_inside(te_ranks: Ranks, recipe: str, keep: bool) -> None:
    found = run(te_ranks, both_ways, recipe=recipe, refill=not keep, keep=keep)
    assert all(found["equal"]) and len(found["equal"]) == 4
    assert found["gradient"] and found["no copy"]
    assert found["casts"] == (5 if keep else 6, 4)  # two micro-batches; no weight from codes
