"""The layers with Triton kernels, in the interpreter, and the FP8 step's freedom from syncs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafp8.layers.native.linear import NativeLinear
from megafp8.numerics import gemm
from tests.layers import test_fp8_recipes as recipes
from tests.layers.test_fp8_linear import IN, OUT, TOKENS, make_linear
from tests.numerics.test_triton_kernels import run_interpreted
from tests.support.oracles import needs_triton

pytestmark = pytest.mark.usefixtures("one_rank")


@needs_triton
def test_layers_match_the_separate_operations() -> None:
    cases = Path(__file__).parent / "triton_layer_cases.py"
    found = run_interpreted(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)])
    assert " passed" in found and "skipped" not in found


@pytest.mark.parametrize("cache", [True, False])
def test_no_host_sync_in_a_step_of_a_linear(monkeypatch: pytest.MonkeyPatch, cache: bool) -> None:
    """On the meta device no value exists: whatever asks for one (item, cpu, float) raises."""
    monkeypatch.setattr(gemm, "native", lambda a, b: True)
    linear, context = make_linear(cache=cache, fp8_weight_amax="cast")
    assert isinstance(linear, NativeLinear)
    registry = context.registry
    assert registry is not None
    for name in ("scale", "scale_inv", "pending_amax", "amax_history", "nonfinite"):
        setattr(registry, name, getattr(registry, name).to("meta"))
    registry.frozen_steps, registry._fp8_max = registry.frozen_steps.to("meta"), registry.scale
    registry._scale_views = registry.scale.unbind()
    registry._scale_inv_views = registry.scale_inv.unbind()
    registry._pending_views = registry.pending_amax.unbind()
    operands = linear.operands
    weight = torch.empty(OUT, IN, dtype=torch.bfloat16, device="meta")
    x = torch.empty(TOKENS, IN, dtype=torch.bfloat16, device="meta")
    dy = torch.empty(TOKENS, OUT, dtype=torch.bfloat16, device="meta")
    _, x8 = operands.enter("input", x, False)
    y = operands.fprop(x8, operands.weight(weight, "fprop"))
    _, dy8 = operands.enter("grad_output", dy, False)
    dx = operands.dgrad(dy8, operands.weight(weight, "dgrad"))
    operands.wgrad_dtype = torch.float32
    dw = operands.wgrad(dy8, x8)
    registry.update()
    assert (y.shape, dx.shape, dw.shape) == ((TOKENS, OUT), (TOKENS, IN), (OUT, IN))
    assert dw.dtype == torch.float32 and y.is_meta and dx.is_meta and dw.is_meta
    with pytest.raises(RuntimeError):
        Tensor.item(registry.scale[0])


@pytest.mark.parametrize("wgrad_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    "recipe",
    ["tensorwise", "rowwise", "rowwise hybrid", "rowwise_with_gw_hp", "blockwise", "mxfp8"],
)
def test_other_recipes_wait_for_nothing_either(
    monkeypatch: pytest.MonkeyPatch, recipe: str, cache: bool, wgrad_dtype: torch.dtype
) -> None:
    """Saved and packed operands too pass torch's own checks of what a GPU's GEMM takes."""
    monkeypatch.setattr(gemm, "native", lambda a, b: True)
    linear, context = recipes.make_linear(recipe, cache=cache)
    registry, operands = context.registry, linear.operands
    assert registry is not None
    for name in ("scale", "scale_inv", "pending_amax", "nonfinite"):
        setattr(registry, name, getattr(registry, name).to("meta"))
    registry._pending_views = registry.pending_amax.unbind()
    operands.wgrad_dtype = wgrad_dtype
    tokens, inner, outer = 256, recipes.IN, recipes.OUT
    shapes = (outer, inner), (tokens, inner), (tokens, outer)
    weight, x, dy = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in shapes)
    x_saved, x8 = operands.enter("input", x, False)
    y = operands.fprop(x8, operands.weight(weight, "fprop"))
    x_saved = operands.unpack("input", *operands.pack(x_saved))
    dy_saved, dy8 = operands.enter("grad_output", dy, False)
    dx = operands.dgrad(dy8, operands.weight(weight, "dgrad"))
    dw = operands.wgrad(dy_saved, operands.gather_again(x_saved, False))
    registry.update()
    assert (y.shape, dx.shape, dw.shape) == ((tokens, outer), (tokens, inner), (outer, inner))
    assert y.is_meta and dx.is_meta and dw.is_meta
    high = recipe == "rowwise_with_gw_hp"
    assert dw.dtype == (torch.bfloat16 if high else wgrad_dtype)
