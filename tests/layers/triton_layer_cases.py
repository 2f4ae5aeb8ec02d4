"""Layers and whole steps with the Triton kernels against plain torch; run in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.layers.mlp import Mlp
from megafp8.layers.native import NativeBackend
from megafp8.layers.native.linear import NativeLinear
from megafp8.numerics import QuantizedTensor
from megafp8.numerics.kernels import choose_kernels
from tests.layers import test_fp8_recipes as recipes
from tests.layers.test_fp8_linear import make_linear, problem
from tests.model.small import (
    FP8,
    LLAMA,
    assert_same_bytes,
    layer_context,
    one_rank,  # noqa: F401
    registry_state,
    small_config,
    start_run,
)

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def linear_results(kernels: str, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(7)
    linear, context = make_linear(**options)
    assert isinstance(linear, NativeLinear) and context.registry is not None
    if kernels == "triton":
        linear.operands.cast.kernels = choose_kernels("triton", "cpu")
    x, dy = problem()
    leaf = x.clone().requires_grad_(True)
    for _ in range(2):  # the second backward adds to the first, as micro-batches do
        y = linear(leaf)
        y.backward(dy)
    gradient = linear.weight.grad
    assert leaf.grad is not None and gradient is not None
    found = {"y": y.detach(), "dx": leaf.grad, "dw": gradient.to_local()}
    return found | registry_state(context.registry)


@pytest.mark.parametrize("weight_amax", ["updated", "cast"])
@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_linear_is_the_same_bit_for_bit(cache: bool, wgrad: bool, weight_amax: str) -> None:
    options = {"cache": cache, "fp8_wgrad": wgrad, "fp8_weight_amax": weight_amax}
    found, wanted = (linear_results(kernels, **options) for kernels in ("triton", "eager"))
    assert_same_bytes(found, wanted)


def test_input_is_kept_as_the_copy_that_wgrad_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, _ = make_linear()
    assert isinstance(linear, NativeLinear)
    linear.operands.cast.kernels = choose_kernels("triton", "cpu")
    saved: list[Tensor] = []
    x, dy = problem()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = linear(x.requires_grad_(True))
    (payload,) = saved
    assert payload.dtype == torch.float8_e4m3fn and payload.shape == x.shape
    assert payload.t().is_contiguous(), "wgrad's column-major operand, without another copy"
    # No product may make a transposed copy of its own: all bring one.
    copies: list[Any] = []
    original = QuantizedTensor.__init__

    def watching(self: QuantizedTensor, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        copies.append(self)

    monkeypatch.setattr(QuantizedTensor, "__init__", watching)
    y.backward(dy)
    gradient = [q for q in copies if q.format.name == "e5m2"]
    assert gradient and all(q.transposed is not None for q in gradient)
    assert linear.operands._cached is not None
    kept = linear.operands._cached[1]
    assert kept.transposed is not None
    assert torch.equal(
        kept.transposed.view(torch.uint8), kept.data.t().contiguous().view(torch.uint8)
    )


def mlp_results(
    kernels: str, cache: bool, fc2: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], bool]:
    """What an MLP gives after fc2 was switched; and whether it has a fused function."""
    config = small_config(LLAMA, **FP8)
    context = layer_context(config, cache_weights=cache, kernels=choose_kernels(kernels, "cpu"))
    torch.manual_seed(3)
    mlp = Mlp(context, NativeBackend(), "decoder.layers.0.mlp", (True, True), False, True, "gelu")
    mlp.to(torch.bfloat16)
    assert context.registry is not None
    context.registry.finalize("cpu")
    context.registry.scale.fill_(64.0)
    context.registry.scale_inv.fill_(1 / 64.0)
    for parameter in mlp.parameters():
        parameter.data.to_local().normal_(std=0.2)
    for precision in fc2:
        mlp.linear_fc2.set_precision(precision)
    x = torch.randn(8, 2, 32).bfloat16().requires_grad_(True)
    y = mlp(x)
    y.backward(torch.randn(8, 2, 32).bfloat16())
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad, "pending": context.registry.pending_amax}
    for name, parameter in mlp.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.to_local()
    return found, mlp._fused is not None


@pytest.mark.parametrize("cache", [True, False])
def test_fused_mlp_matches_the_separate_operations(cache: bool) -> None:
    (found, fused), (wanted, separate) = mlp_results("triton", cache), mlp_results("eager", cache)
    assert fused and not separate
    for name, value in wanted.items():
        error = (found[name].float() - value.float()).norm() / value.float().norm()
        assert error < 0.01, name  # a bf16 rounding of SwiGLU may go the other way
    assert_close = torch.testing.assert_close
    assert_close(found["pending"], wanted["pending"], rtol=2.0**-7, atol=0)


def test_fused_mlp_is_separate_while_a_linear_is_bf16() -> None:
    (found, fused), (wanted, _) = (mlp_results(k, True, ("bf16",)) for k in ("triton", "eager"))
    assert fused
    assert_same_bytes(found, wanted)
    (again, _), (never, _) = (
        mlp_results("triton", True, ("bf16", "fp8")),
        mlp_results("triton", True),
    )
    assert_same_bytes(again, never)


def test_whole_training_steps_match() -> None:
    results = []
    for kernels in ("triton", "eager"):
        run = start_run(small_config(LLAMA, **FP8, fp8_kernels=kernels))
        chosen = run.model.backend.record()["fp8_kernels"]
        assert chosen["asked"] == chosen["chosen"] == kernels
        losses = [result.loss for result in run.train(range(2))]
        results.append((losses, run.model.registry.scale.clone()))
    (found, scales), (wanted, others) = results
    assert found == pytest.approx(wanted, rel=2e-3)
    torch.testing.assert_close(scales, others, rtol=0.05, atol=0)


def test_tensor_parallel_gathers_get_their_columns() -> None:
    """What a gathered operand goes through, on one rank: codes and their transposed copy."""
    linear, _ = make_linear()
    assert isinstance(linear, NativeLinear)
    linear.operands.cast.kernels = choose_kernels("triton", "cpu")
    x, dy = problem()
    saved, full = linear.operands.enter("input", x, gather=True)
    assert saved.transposed is None and full.transposed is None
    again = linear.operands.gather_again(saved, gather=True)
    assert torch.equal(
        again.transposed.view(torch.uint8), saved.data.t().contiguous().view(torch.uint8)
    )
    _, gradient = linear.operands.enter("grad_output", dy, gather=True)
    assert gradient.transposed.shape == gradient.data.t().shape


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        "tensorwise e4m3",
        "rowwise",
        "rowwise hybrid",
        "rowwise_with_gw_hp",
        "blockwise",
        "blockwise fp32",
        "mxfp8",
    ],
)
def test_other_recipes_are_the_same_bit_for_bit(recipe: str, cache: bool) -> None:
    results = []
    for kernels in ("triton", "eager"):
        torch.manual_seed(5)
        linear, context = recipes.make_linear(recipe, cache=cache)
        operands: Any = linear.operands
        if kernels == "triton":
            holder = operands.cast if recipe.startswith("tensorwise") else operands
            holder.kernels = choose_kernels("triton", "cpu")
        found = recipes.products(linear, *recipes.problem())
        results.append(found | registry_state(context.registry))
    assert_same_bytes(*results)
