"""FP8 linears with scales of the tensor itself, recipe by recipe, against the exact reference."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.layers import LayerContext, LinearOptions
from megafp8.layers.native.linear import NativeLinear
from megafp8.numerics import (
    QuantizedTensor,
    Role,
    compute_amax,
    quantize_blocks,
    quantize_tensor,
)
from megafp8.numerics.products import matmul
from tests.model.small import (
    GPT2,
    assert_same_bytes,
    layer_context,
    registry_state,
    small_config,
)
from tests.support import reference

pytestmark = pytest.mark.usefixtures("one_rank")
NAME = "decoder.layers.0.mlp.linear_fc1"
TOKENS, IN, OUT = 128, 256, 128
RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {"fp8_format": "hybrid"},
    "tensorwise e4m3": {"fp8_format": "e4m3", "fp8_power_of_2_scales": True},
    "rowwise": {},
    "rowwise hybrid": {"fp8_format": "hybrid", "fp8_power_of_2_scales": True},
    "rowwise_with_gw_hp": {},
    "blockwise": {},
    "blockwise fp32": {"fp8_power_of_2_scales": False},
    "mxfp8": {},
    "mxfp8 hybrid": {"fp8_format": "hybrid"},
}
EACH = pytest.mark.parametrize("recipe", RECIPES)


def make_linear(
    recipe: str, in_features: int = IN, out_features: int = OUT, cache: bool = True, **changes: Any
) -> tuple[NativeLinear, LayerContext]:
    values = {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": recipe.split()[0]}
    values |= {"hidden_size": in_features, "ffn_hidden_size": out_features, "kv_channels": 16}
    config = small_config(GPT2, **{**values, **RECIPES[recipe], **changes})
    context = layer_context(config, cache_weights=cache)
    linear = NativeLinear(context, LinearOptions(NAME, "column", True, False))
    linear.to(torch.bfloat16)  # as FSDP hands it over
    assert context.registry is not None
    context.registry.finalize("cpu")
    return linear, context


def problem(tokens: int = TOKENS, in_features: int = IN, out_features: int = OUT):
    x = torch.randn(tokens, in_features, generator=torch.Generator().manual_seed(1))
    x = x * torch.logspace(-3, 3, in_features)  # columns of very different sizes
    x[5] = 0.0
    dy = torch.randn(tokens, out_features, generator=torch.Generator().manual_seed(2)) * 1e-4
    return x.bfloat16(), dy.bfloat16()


def products(linear: NativeLinear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    leaf = x.detach().requires_grad_(True)
    linear.weight.grad = None
    y = linear(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    return {"y": y.detach(), "dx": leaf.grad, "dw": linear.weight.grad.to_local()}


def expected_cast(
    context: LayerContext, role: Role, x: Tensor, axis: str
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Reference codes, elementwise scale_inv and format for a GEMM that sums over `axis`."""
    recipe = context.recipe
    assert recipe is not None
    fmt = recipe.format(role)
    values = x.detach().float().numpy()
    block = recipe.spec.block(role, axis)  # type: ignore[arg-type]
    codes, scale_inv = reference.quantize_blocks(
        values, block, fmt, recipe.spec.e8m0, recipe.power_of_2_scales
    )
    return codes, scale_inv, fmt


@EACH
def test_products_match_the_exact_reference(recipe: str) -> None:
    linear, context = make_linear(recipe)
    x, dy = problem()
    found = products(linear, x, dy)
    w = linear.weight.data.to_local()

    def product(a: Any, a_t: bool, b: Any, b_t: bool) -> tuple[np.ndarray, np.ndarray]:
        (left, left_s, fa), (right, right_s, fb) = a, b
        left, left_s = (left.T, left_s.T) if a_t else (left, left_s)
        right, right_s = (right.T, right_s.T) if b_t else (right, right_s)
        exact = reference.scaled_gemm(left, left_s, fa, right, right_s, fb)
        sizes = np.abs(reference.code_values(fa)[left] * left_s) @ np.abs(
            reference.code_values(fb)[right] * right_s
        )
        return exact, sizes

    def cast(role: Role, tensor: Tensor, axis: str) -> Any:
        return expected_cast(context, role, tensor, axis)

    wanted = {
        "y": product(cast("input", x, "features"), False, cast("weight", w, "features"), True),
        "dx": product(
            cast("grad_output", dy, "features"), False, cast("weight", w, "tokens"), False
        ),
        "dw": product(cast("grad_output", dy, "tokens"), True, cast("input", x, "tokens"), False),
    }
    assert context.recipe is not None
    if not context.recipe.fp8_wgrad:
        plain = (dy.double().t() @ x.double()).numpy()
        wanted["dw"] = plain, (dy.double().abs().t() @ x.double().abs()).numpy()
    for name, (exact, sizes) in wanted.items():
        assert found[name].dtype == torch.bfloat16 and found[name].shape == exact.shape
        ulp = np.exp2(np.floor(np.log2(np.abs(exact).clip(1e-30))) - 7)
        error = np.abs(found[name].double().numpy() - exact)
        assert (error <= 1.51 * ulp + sizes * 2.0**-18).all(), name
    assert not found["y"][5].any(), "a dead row"


@EACH
@pytest.mark.parametrize("cache", [True, False])
def test_what_is_kept_for_the_backward(recipe: str, cache: bool) -> None:
    """The input in one byte a value and its scales (or whole, for a high-precision wgrad)."""
    linear, context = make_linear(recipe, cache=cache)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(problem()[0].requires_grad_(True))
    weight = linear.weight.data.to_local()
    own = [t for t in saved if t.data_ptr() == weight.data_ptr()]
    assert len(own) == (0 if cache else 1), "the parameter costs nothing to keep"
    kept = sum(t.nbytes for t in saved if t.data_ptr() != weight.data_ptr())
    values = TOKENS * IN
    assert context.recipe is not None
    if not context.recipe.fp8_wgrad:
        assert kept == 2 * values
    else:
        scales = {"tensorwise": 0, "rowwise": 4 * IN, "blockwise": 4 * IN, "mxfp8": values // 32}
        assert kept == values + scales[context.recipe.name]


@EACH
def test_gradient_casts_are_made_once_for_each_product(recipe: str, monkeypatch) -> None:
    import megafp8.layers.native.casting as casting
    import megafp8.layers.native.granular as granular

    linear, context = make_linear(recipe)
    calls: list[str] = []

    def counted(function: Any) -> Any:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append("w" if x.shape == (OUT, IN) else "x" if x.shape[1] == IN else "dy")
            return function(x, *args, **kwargs)

        return call

    monkeypatch.setattr(granular, "quantize_blocks", counted(quantize_blocks))
    monkeypatch.setattr(casting, "quantize_tensor", counted(quantize_tensor))
    for _ in range(2):
        products(linear, *problem(2 * TOKENS))
    name = context.recipe.name if context.recipe is not None else ""
    twice = 1 if name in ("tensorwise", "rowwise_with_gw_hp") else 2
    assert calls.count("x") == calls.count("dy") == 2 * twice
    assert calls.count("w") == (1 if name in ("tensorwise", "blockwise") else 2), "kept"


@EACH
@pytest.mark.parametrize("fill", [0.0, -0.0])
def test_zero_operands_give_exact_zeros(recipe: str, fill: float) -> None:
    x, dy = problem()
    linear, _ = make_linear(recipe)
    found = products(linear, x, torch.full_like(dy, fill))
    assert not found["dx"].any() and not found["dw"].any()
    found = products(linear, torch.full_like(x, fill), dy)
    assert not found["y"].any() and not found["dw"].any() and found["dx"].isfinite().all()
    linear, _ = make_linear(recipe)
    linear.weight.data.to_local().fill_(fill)
    found = products(linear, x, dy)
    assert not found["y"].any() and not found["dx"].any() and found["dw"].isfinite().all()


@EACH
def test_a_non_finite_value_is_named(recipe: str) -> None:
    for role, index in (("input", 0), ("grad_output", 1)):
        for bad in (torch.inf, torch.nan):
            linear, context = make_linear(recipe)
            tensors = problem()
            tensors[index][3, 4] = bad
            products(linear, *tensors)
            registry = context.registry
            assert registry is not None
            found = ~registry.pending_amax.isfinite()
            assert [registry.keys[i] for i in found.nonzero().flatten()] == [(NAME, role)]
            registry.update()
            assert registry.nonfinite.tolist() == found.int().tolist()
            assert not registry.pending_amax.any()


def strided(kind: str) -> tuple[Tensor, Tensor]:
    if kind == "transposed":
        return torch.randn(256, 128).bfloat16().t(), torch.randn(128, 128).bfloat16().t()
    if kind == "sliced":
        x = torch.randn(2, 70, 256).bfloat16()[:, 6:, :]
        return x, torch.randn(2, 64, 256).bfloat16()[..., ::2]
    return torch.randn(128, 256).bfloat16(), torch.ones(1, 128).bfloat16().expand(128, 128)


@EACH
@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
def test_any_strides(recipe: str, kind: str) -> None:
    x, dy = strided(kind)
    assert not (x.is_contiguous() and dy.is_contiguous())
    results = []
    for contiguous in (False, True):
        linear, context = make_linear(recipe)
        tensors = (x.contiguous(), dy.contiguous()) if contiguous else (x, dy)
        results.append(products(linear, *tensors) | registry_state(context.registry))
    assert results[0]["dx"].abs().sum() > 0
    assert_same_bytes(*results)
    assert results[0]["registry.pending_amax"][0] == x.float().abs().max()


@EACH
def test_kept_weights_change_no_bit_and_are_cast_anew_after_an_update(recipe: str) -> None:
    x, dy = problem()
    kept, context = make_linear(recipe)
    each, _ = make_linear(recipe, cache=False)
    first = products(kept, x, dy)
    assert_same_bytes(products(each, x, dy), first)
    assert_same_bytes(products(kept, x, dy), first)
    for linear in (kept, each):
        linear.weight.data.to_local().mul_(1.5)
    assert torch.equal(products(kept, x, dy)["y"], first["y"]), "kept for the whole step"
    assert context.registry is not None
    context.registry.update()
    assert_same_bytes(products(kept, x, dy), products(each, x, dy))


@EACH
def test_paused_registry_records_nothing(recipe: str) -> None:
    linear, context = make_linear(recipe)
    x, dy = problem()
    registry = context.registry
    assert registry is not None
    with registry.paused():
        products(linear, x, dy)
    assert not registry.pending_amax.any()
    products(linear, x, dy)
    weight = linear.weight.data.to_local()
    assert registry.pending_amax.tolist() == [float(compute_amax(t)) for t in (x, weight, dy)]
    assert registry.tensors() == {} and registry.load({}) == 0


@EACH
def test_high_precision_weight_gradient(recipe: str) -> None:
    if recipe == "rowwise_with_gw_hp":
        recipe, changes = "rowwise", {"fp8_recipe": "rowwise_with_gw_hp"}
    else:
        changes = {"fp8_wgrad": False}
    x, dy = problem()
    fp8 = products(make_linear(recipe)[0], x, dy)
    found = products(make_linear(recipe, **changes)[0], x, dy)
    assert torch.equal(found["y"], fp8["y"]) and torch.equal(found["dx"], fp8["dx"])
    assert torch.equal(found["dw"], dy.t() @ x) and not torch.equal(found["dw"], fp8["dw"])


@pytest.mark.parametrize("recipe", [*RECIPES, "delayed"])
def test_fake_quantization_multiplies_decoded_values_in_bf16(recipe: str, monkeypatch) -> None:
    monkeypatch.setitem(RECIPES, "delayed", {"fp8_format": "hybrid"})
    x, dy = problem()
    found = products(make_linear(recipe, fp8_fake_quant=True)[0], x, dy)
    wanted = products(make_linear(recipe)[0], x, dy)
    linear, context = make_linear(recipe, fp8_fake_quant=True)
    _, operand = linear.operands.enter("input", x, False)
    assert isinstance(operand, QuantizedTensor)
    weight: Any = linear.operands.weight(linear.weight.data.to_local(), "fprop")
    weight = weight if isinstance(weight, QuantizedTensor) else weight.fprop
    # Not torch's own bf16 product, which adds in another order on CPUs without BF16 units.
    assert torch.equal(found["y"], matmul(operand.dequantize(), weight.dequantize().t()))
    for name, value in wanted.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert error < 2.0**-7, (name, float(error))
    assert "multiplied as bf16" in repr(linear)


def test_repr_tells_what_shares_a_scale_in_each_gemm() -> None:
    for recipe, fragments in {
        "tensorwise": ("fp8 tensorwise: input e4m3, weight e4m3, grad_output e5m2",),
        "rowwise": ("dgrad dy:e4m3[row] * w:e4m3[column]", "wgrad dy:e4m3[column] * x:e4m3[colu"),
        "rowwise_with_gw_hp": ("fp8 rowwise_with_gw_hp", "wgrad in high precision"),
        "blockwise": ("power-of-two scales", "fprop x:e4m3[1x128] * w:e4m3[128x128]"),
        "mxfp8 hybrid": ("dgrad dy:e5m2[1x32] * w:e4m3[32x1]", "wgrad dy:e5m2[32x1]"),
    }.items():
        text = repr(make_linear(recipe)[0])
        assert NAME in text and all(fragment in text for fragment in fragments), text
    assert "power-of-two" not in repr(make_linear("blockwise fp32")[0])


@EACH
def test_no_tokens_give_no_rows_and_a_zero_weight_gradient(recipe: str) -> None:
    x, dy = problem()
    found = products(make_linear(recipe)[0], x[:0], dy[:0])
    assert found["y"].shape == (0, OUT) and found["dx"].shape == (0, IN)
    assert found["dw"].shape == (OUT, IN) and not found["dw"].any()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_second_derivative_is_refused(recipe: str) -> None:
    """A gradient penalty would silently be a constant: casts have no derivative."""
    x, _ = problem()
    y = make_linear(recipe)[0](x.requires_grad_(True))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (dx.square().sum() + y.sum()).backward()
