"""Current scaling against torchao's Float8Linear, if torchao is there: codes, products, noise.

torchao divides in fp64 and rounds the scale to fp32 after; here the division is in fp32, as in
TransformerEngine. Scales differ by an ulp at most, which flips few roundings. With powers of two
they are equal.
"""

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafp8.layers import LinearOptions
from megafp8.layers.native.linear import NativeLinear
from megafp8.numerics import (
    E4M3,
    E5M2,
    Recipe,
    compute_amax,
    quantize_blocks,
    quantize_tensor,
)
from tests.model.small import GPT2, layer_context, small_config
from tests.support.oracles import need

need("torchao")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao import float8
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

pytestmark = pytest.mark.usefixtures("one_rank")
NAME = "decoder.layers.0.mlp.linear_fc1"
TOKENS, IN, OUT = 64, 256, 128
FLIPPED = 1e-3  # of all codes, at most
# torchao's own floors: test_base.py (y 18 dB, dw 17 dB).
FLOORS = {"y": 18.0, "dx": 18.0, "dw": 17.0}


def sqnr_db(wanted: Tensor, found: Tensor) -> float:
    wanted, found = wanted.double(), found.double()
    noise = float((wanted - found).norm())
    return 20 * math.log10(float(wanted.norm()) / noise) if noise else math.inf


def linears(recipe: str, **flags: Any) -> tuple[NativeLinear, nn.Module]:
    """One layer of each library with the same weight."""
    config = small_config(
        GPT2,
        bf16=True,
        fp8_format="hybrid" if recipe == "tensorwise" else "e4m3",
        fp8_recipe=recipe,
        hidden_size=IN,
        ffn_hidden_size=OUT,
        kv_channels=16,
        **flags,
    )
    context = layer_context(config)
    ours = NativeLinear(context, LinearOptions(NAME, "column", True, False))
    ours.to(torch.bfloat16)
    assert context.registry is not None
    context.registry.finalize("cpu")
    plain = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    plain.weight.data.copy_(ours.weight.data.to_local())
    # Emulated, as it has it for devices without FP8 units; oneDNN lacks some CPUs' FP8 products.
    options = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = float8.convert_to_float8_training(nn.Sequential(plain), config=options)
    return ours, theirs


def results(layer: nn.Module, x: Tensor, dy: Tensor, weight: Any) -> dict[str, Tensor]:
    leaf = x.clone().requires_grad_(True)
    y = layer(leaf)
    y.backward(dy)
    dw = weight.grad
    assert leaf.grad is not None
    return {
        "y": y.detach(),
        "dx": leaf.grad,
        "dw": dw.to_local() if hasattr(dw, "to_local") else dw,
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_linear_equals_torchao(recipe: str) -> None:
    flags = {} if recipe == "tensorwise" else {"fp8_power_of_2_scales": True}
    ours, theirs = linears(recipe, **flags)
    x, dy = torch.randn(TOKENS, IN).bfloat16(), torch.randn(TOKENS, OUT).bfloat16() * 1e-3
    found = results(ours, x, dy, ours.weight)
    wanted = results(theirs, x, dy, theirs[0].weight)
    weight = ours.weight.data.to_local()
    exact = {"y": x.double() @ weight.double().t(), "dx": dy.double() @ weight.double()}
    exact["dw"] = dy.double().t() @ x.double()
    for name, floor in FLOORS.items():
        mine, other = sqnr_db(exact[name], found[name]), sqnr_db(exact[name], wanted[name])
        assert mine > floor and other > floor, (name, mine, other)
        if recipe == "rowwise_with_gw_hp" and name == "dx":
            # There torchao casts the weight with one scale, here with one a column.
            assert mine > other - 0.1, (mine, other)
            continue
        assert abs(mine - other) < 0.2, (name, mine, other)
        # One from the other: BF16 rounding of equal codes, or a few flipped ones.
        assert sqnr_db(wanted[name], found[name]) > 45.0, name


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("power_of_2", [False, True])
def test_codes_equal_torchao(fmt: Any, power_of_2: bool) -> None:
    total = different = 0
    for seed in range(20):
        x = torch.randn(128, 320, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (
            seed % 7 - 3
        )
        x[:, 5] *= 100.0
        x = x.bfloat16()
        tensor = quantize_tensor(x, fmt, compute_amax(x), power_of_2)
        scale = tensor_to_scale(x, fmt.dtype, round_scales_to_power_of_2=power_of_2)
        pairs = [(tensor.data, x.float() * scale)]
        for dim, block in ((-1, (1, 0)), (0, (0, 1))):
            recipe = Recipe(name="rowwise", power_of_2_scales=power_of_2)
            scale = tensor_to_scale(
                x,
                fmt.dtype,
                scaling_granularity=ScalingGranularity.AXISWISE,
                axiswise_dim=dim,
                round_scales_to_power_of_2=power_of_2,
            )
            pairs.append((quantize_blocks(x, block, fmt, recipe)[0].data, x.float() * scale))
        for codes, scaled in pairs:
            wanted = to_fp8_saturated(scaled, fmt.dtype)
            flips = (codes.view(torch.uint8) != wanted.view(torch.uint8)).sum()
            total, different = total + codes.numel(), different + int(flips)
    assert different <= (0 if power_of_2 else FLIPPED * total), (different, total)
