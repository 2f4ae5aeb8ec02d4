"""The FP8 linear against the slow exact reference: codes, products, what is kept, any strides."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.layers import LayerContext, LinearOptions
from megafp8.layers.native.linear import NativeLinear
from megafp8.numerics import E4M3, E5M2
from tests.model.small import (
    FP8,
    GPT2,
    assert_same_bytes,
    layer_context,
    registry_state,
    small_config,
    ulps_apart,
)
from tests.support import reference

pytestmark = pytest.mark.usefixtures("one_rank")
NAME = "decoder.layers.0.mlp.linear_fc1"
TOKENS, IN, OUT = 48, 64, 32
# Powers of two and numbers that are none: with the latter every product is rounded.
SCALES = {"input": 112.3, "weight": 1000.0, "grad_output": 37.7}


def make_linear(
    fp8: bool = True, in_features: int = IN, out_features: int = OUT, cache: bool = True, **changes
) -> tuple[NativeLinear, LayerContext]:
    values = {**FP8, "hidden_size": in_features, "ffn_hidden_size": out_features, **changes}
    context = layer_context(small_config(GPT2, kv_channels=16, **values), cache_weights=cache)
    linear = NativeLinear(context, LinearOptions(NAME, "column", fp8, False))
    # As FSDP hands it over: gathered in bf16.
    linear.to(torch.bfloat16)
    assert context.registry is not None
    context.registry.finalize("cpu")
    for role, scale in SCALES.items() if fp8 else ():
        index = context.registry.index_of(NAME, role)
        context.registry.scale[index] = scale
    torch.reciprocal(context.registry.scale, out=context.registry.scale_inv)
    return linear, context


def problem(tokens: int = TOKENS, in_features: int = IN, out_features: int = OUT):
    x = torch.randn(tokens, in_features).bfloat16()
    x[0, :4] = torch.tensor([0.0, -0.0, 1e-4, 100.0])  # zeros, an underflow, a saturation
    return x, torch.randn(tokens, out_features).mul_(0.3).bfloat16()


def codes(x: Tensor, scale: float, fmt) -> np.ndarray:
    return reference.quantize(x.detach().float().numpy(), float(np.float32(scale)), fmt)


def inverse(*roles: str) -> float:
    """Product of the factors that bring the codes back, each rounded to fp32 as stored."""
    return float(np.prod([float(np.float32(1) / np.float32(SCALES[role])) for role in roles]))


def rounded(exact: np.ndarray) -> Tensor:
    return torch.from_numpy(reference.to_bfloat16_grid(exact)).to(torch.bfloat16)


def test_products_match_the_exact_reference():
    linear, _ = make_linear()
    x, dy = problem()
    leaf = x.clone().requires_grad_(True)
    y = linear(leaf)
    y.backward(dy)
    x8 = codes(x, SCALES["input"], E4M3)
    w8 = codes(linear.weight.data.to_local(), SCALES["weight"], E4M3)
    dy8 = codes(dy, SCALES["grad_output"], E5M2)
    wanted_y = reference.gemm(x8, E4M3, w8.T, E4M3, inverse("input", "weight"))
    wanted_dx = reference.gemm(dy8, E5M2, w8, E4M3, inverse("grad_output", "weight"))
    wanted_dw = reference.gemm(dy8.T, E5M2, x8, E4M3, inverse("grad_output", "input"))
    found = {"y": y, "dx": leaf.grad, "dw": linear.weight.grad.to_local()}
    for (name, tensor), exact in zip(found.items(), (wanted_y, wanted_dx, wanted_dw), strict=True):
        assert tensor.dtype == torch.bfloat16 and tensor.shape == exact.shape, name
        assert ulps_apart(tensor, rounded(exact)) <= 1, name
    plain = x.float() @ linear.weight.data.to_local().float().t()
    assert not torch.equal(y.float(), plain), "the values went through FP8"
    assert (y.float() - plain)[1:].abs().max() < 0.1 * plain[1:].abs().max()


@pytest.mark.parametrize("cache", [True, False])
def test_what_is_kept_for_the_backward(cache):
    """The input as its one-byte payload; the weight as payload, or as the parameter itself."""
    linear, _ = make_linear(cache=cache)
    x, dy = problem()
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(x.requires_grad_(True))
    weight = linear.weight.data.to_local()
    own = [t for t in saved if t.data_ptr() == weight.data_ptr()]
    others = [t for t in saved if t.data_ptr() != weight.data_ptr()]
    assert len(own) == (0 if cache else 1), "the parameter costs nothing to keep"
    assert [t.dtype for t in others if t.dim() > 1] == [torch.float8_e4m3fn]
    payload = others[0]
    wanted = codes(x, SCALES["input"], E4M3)
    assert np.array_equal(payload.view(torch.uint8).numpy(), wanted)
    assert 0x00 in wanted and 0x80 in wanted and 0x7E in wanted


def test_cached_weight_holds_the_reference_codes():
    linear, context = make_linear()
    linear(problem()[0])
    first = linear.operands._cached[1]
    weight = linear.weight.data.to_local()
    wanted = codes(weight, SCALES["weight"], E4M3)
    assert np.array_equal(first.data.view(torch.uint8).numpy(), wanted)
    linear(problem()[0])
    assert linear.operands._cached[1] is first, "cast once a step"


def test_grad_output_is_cast_once_and_feeds_both_products(monkeypatch):
    linear, _ = make_linear()
    import megafp8.layers.native.casting as casting

    seen: list[str] = []
    original = casting.quantize

    def counting(x, scale, fmt):
        seen.append(fmt.name)
        return original(x, scale, fmt)

    monkeypatch.setattr(casting, "quantize", counting)
    x, dy = problem()
    linear(x.requires_grad_(True)).backward(dy)
    assert seen == ["e4m3", "e4m3", "e5m2"]


@pytest.mark.parametrize("fill", [0.0, -0.0])
def test_zero_output_gradient_gives_exact_zeros(fill):
    linear, context = make_linear()
    x, _ = problem()
    linear(x.requires_grad_(True)).backward(torch.full((TOKENS, OUT), fill).bfloat16())
    assert x.grad is not None
    assert not x.grad.any() and not linear.weight.grad.to_local().any()
    before = context.registry.scale.clone()
    context.registry.update()
    index = context.registry.index_of(NAME, "grad_output")
    assert context.registry.scale[index] == before[index] == torch.tensor(SCALES["grad_output"])
    assert not context.registry.amax_history[:, index].any()


@pytest.mark.parametrize("dead", ["input", "weight"])
def test_zero_operands_give_exact_zeros(dead):
    linear, _ = make_linear()
    x, dy = problem()
    if dead == "input":
        x.zero_()
    else:
        linear.weight.data.to_local().zero_()
    y = linear(x.requires_grad_(True))
    y.backward(dy)
    assert not y.any()
    assert (linear.weight.grad.to_local() if dead == "input" else x.grad).any().item() is False


def test_a_dead_row_leaves_the_others_as_they_were():
    linear, _ = make_linear()
    x, _ = problem()
    whole = linear(x)
    x[3] = 0.0
    y = linear(x)
    assert not y[3].any()
    rest = torch.arange(TOKENS) != 3
    assert torch.equal(y[rest], whole[rest])


def strided(kind: str, fp8: bool) -> tuple[Tensor, Tensor]:
    """An input and an output gradient with unusual strides; FP8 sizes are multiples of 16."""
    out = 32 if fp8 else 24
    if kind == "transposed":
        return torch.randn(32, 16).bfloat16().t(), torch.randn(out, 16).bfloat16().t()
    if kind == "sliced":
        length = 11 if fp8 else 8
        x = torch.randn(2, length, 32).bfloat16()[:, 3:, :]
        return x, torch.randn(2, x.shape[1], 2 * out).bfloat16()[..., ::2]
    return torch.randn(16, 32).bfloat16(), torch.ones(1, out).bfloat16().expand(16, out)


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
@pytest.mark.parametrize("fp8", [True, False])
def test_any_strides(kind, fp8):
    x, dy = strided(kind, fp8)
    assert not (x.is_contiguous() and dy.is_contiguous())
    results = []
    for contiguous in (False, True):
        linear, context = make_linear(fp8, 32, dy.shape[-1])
        leaf = (x.contiguous() if contiguous else x.detach()).requires_grad_(True)
        y = linear(leaf)
        y.backward(dy.contiguous() if contiguous else dy)
        found = {"y": y.detach(), "dx": leaf.grad, "dw": linear.weight.grad.to_local()}
        results.append(found | registry_state(context.registry))
        leaf.requires_grad_(False)
    assert results[0]["y"].shape == (*x.shape[:-1], dy.shape[-1])
    assert results[0]["dx"].abs().sum() > 0
    assert_same_bytes(*results)
    amax = results[0]["registry.pending_amax"]
    if fp8:
        assert amax[0] == x.float().abs().max() and amax[2] == dy.float().abs().max()


def test_transposed_weight_view():
    linear, _ = make_linear(in_features=32, out_features=48)
    flipped = torch.randn(32, 48).bfloat16().t()
    first = linear.operands.cast("weight", flipped)
    second = linear.operands.cast("weight", flipped.contiguous())
    assert torch.equal(first.data.view(torch.uint8), second.data.view(torch.uint8))
    assert first.data.is_contiguous()


def test_weight_is_decoded_with_the_scale_of_its_cast():
    """Scales move between forward and backward: the kept weight does not notice."""
    results = []
    for move in (False, True):
        linear, context = make_linear()
        torch.manual_seed(3)
        x, dy = problem()
        y = linear(x.requires_grad_(True))
        if move:
            index = context.registry.index_of(NAME, "weight")
            context.registry.scale[index] = 25.0
            context.registry.scale_inv[index] = 1 / 25.0
        y.backward(dy)
        results.append(x.grad)
    assert torch.equal(*results)


def test_paused_registry_records_nothing():
    linear, context = make_linear()
    x, dy = problem()
    with context.registry.paused():
        linear(x.requires_grad_(True)).backward(dy)
    assert not context.registry.pending_amax.any()
    linear(x).backward(dy)
    recorded = context.registry.pending_amax.tolist()
    assert recorded == [x.float().abs().max(), 0.0, dy.float().abs().max()]


def test_weight_amax_at_the_cast():
    linear, context = make_linear(fp8_weight_amax="cast")
    linear(problem()[0])
    index = context.registry.index_of(NAME, "weight")
    wanted = linear.weight.data.to_local().float().abs().max()
    assert context.registry.pending_amax[index] == wanted


def test_high_precision_weight_gradient():
    """--no-fp8-wgrad: dw is the bf16 product, y and dx stay what they were, x is kept in bf16."""
    results, kept = [], []
    for wgrad in (True, False):
        linear, _ = make_linear(fp8_wgrad=wgrad)
        torch.manual_seed(3)
        x, dy = problem()

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor.dtype)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = linear(x.requires_grad_(True))
        y.backward(dy)
        results.append((y, x.grad, linear.weight.grad.to_local()))
    (y8, dx8, dw8), (y, dx, dw) = results
    assert torch.equal(y8, y) and torch.equal(dx8, dx)
    assert torch.equal(dw, dy.t() @ x.detach()) and not torch.equal(dw, dw8)
    assert kept.count(torch.bfloat16) == 1


def test_repr_tells_the_precision_of_each_role():
    text = repr(make_linear()[0])
    assert NAME in text and "input e4m3, weight e4m3, grad_output e5m2" in text
    assert "wgrad in high precision" in repr(make_linear(fp8_wgrad=False)[0])
