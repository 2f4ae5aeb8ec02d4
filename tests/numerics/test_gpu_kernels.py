"""The fused kernels on a CUDA device: codes, amaxes and transposed copies of plain torch.

Imports what a machine with torch, Triton and pytest alone has.
"""

import pytest
import torch
from torch import Tensor

from megafp8.numerics import (
    E4M3,
    E5M2,
    Fp8Format,
    Recipe,
    compute_amax,
    fp8_hardware,
    quantize,
    quantize_blocks,
)
from megafp8.numerics.kernels import choose_kernels

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def needs_kernels() -> None:
    choice = choose_kernels("auto", "cuda")
    if not choice.fused:
        pytest.skip(choice.reason)


def everything(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a 16-bit type as a matrix; for fp32 those of bf16 and their midpoints."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype == torch.float32:
        return torch.cat((bits << 16, (bits << 16) | 0x8000)).view(torch.float32).view(-1, 128)
    return bits.to(torch.int16).view(dtype).view(-1, 64)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_all_values(dtype: torch.dtype, fmt: Fp8Format) -> None:
    needs_kernels()
    from megafp8.numerics.kernels.cast import cast

    x = everything(dtype).cuda()
    number = ~x.isnan()
    for factor in (1.0, 99.7, 3e-5):
        scale = torch.tensor(factor, device="cuda")
        out, out_t = cast(x, scale, fmt, transposed=True)
        assert out is not None and out_t is not None
        found, wanted = out.view(torch.uint8), quantize(x, scale, fmt).view(torch.uint8)
        assert torch.equal(found[number], wanted[number])
        assert (found[~number] & 0x7F == 0x7F).all()
        assert torch.equal(out_t.view(torch.uint8), found.t().contiguous())


@pytest.mark.parametrize("shape", [(1, 1), (67, 129), (4096, 512)])
def test_amax_and_strides(shape: tuple[int, int]) -> None:
    needs_kernels()
    from megafp8.numerics.kernels.cast import cast

    x = torch.randn(shape, device="cuda").bfloat16()
    for view in (x, x.t()):
        amax = torch.zeros((), device="cuda")
        out, _ = cast(view, torch.ones((), device="cuda"), E4M3, amax=amax)
        assert out is not None and torch.equal(amax, compute_amax(view))
        wanted = quantize(view, torch.ones((), device="cuda"), E4M3)
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    amax = torch.tensor(float("inf"), device="cuda")
    x[0, 0] = float("nan")
    cast(x, torch.ones((), device="cuda"), E4M3, amax=amax)
    assert amax.isnan()


def test_a_linear_waits_for_nothing() -> None:
    """No host sync from the cast of x to the weight gradient."""
    needs_kernels()
    if not fp8_hardware("cuda")[0]:
        pytest.skip(fp8_hardware("cuda")[1])
    from megafp8.layers.native.casting import DelayedCasts
    from megafp8.numerics import Recipe, ScaleRegistry, dgrad, fprop, wgrad
    from megafp8.parallel.collectives import CommGroup
    from megafp8.parallel.traffic import Traffic

    registry = ScaleRegistry(Recipe())
    index = {role: registry.register("layer", role) for role in ("input", "weight", "grad_output")}
    registry.finalize("cuda")
    cast = DelayedCasts(
        registry, registry.recipe, index, choose_kernels("auto", "cuda"), CommGroup(None, Traffic())
    )
    x, w, dy = (
        torch.randn(shape, device="cuda").bfloat16() for shape in ((64, 32), (48, 32), (64, 48))
    )

    def step() -> None:
        x8 = cast("input", x, columns=True)
        w8 = cast("weight", w, record=False, columns=True)
        fprop(x8, w8)
        dy8 = cast("grad_output", dy, columns=True)
        dgrad(dy8, w8)
        wgrad(dy8, x8, torch.float32)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        registry.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def awkward(m: int, k: int) -> Tensor:
    """bf16 [m, k] of many magnitudes, with a row of zeros, a tiny one and an outlier."""
    x = torch.randn(m, k, device=DEVICE) * torch.logspace(-6, 4, m, device=DEVICE)[:, None]
    x[0], x[m // 2], x[m // 3, k // 3] = 0.0, 1e-30, 3e4
    return x.bfloat16()


def same(found: Tensor, wanted: Tensor) -> bool:
    a, b = (t.contiguous().view(torch.uint8) for t in (found, wanted))
    return torch.equal(a, b)


# Few combinations: each is compiled anew, for about a second.
@pytest.mark.parametrize(
    ("shape", "transposed", "fmt"),
    [((130, 257), False, E4M3), ((512, 384), True, E4M3), ((512, 384), False, E5M2)],
)
def test_rows_and_blocks(shape: tuple[int, int], transposed: bool, fmt: Fp8Format) -> None:
    needs_kernels()
    from megafp8.numerics.kernels.blocks import TILES, cast_blocks
    from megafp8.numerics.kernels.rows import cast_rows

    x = awkward(*shape)
    x = x.t() if transposed else x
    for power_of_2 in (False, True):
        recipe = Recipe(name="rowwise", power_of_2_scales=power_of_2)
        *found, amax = cast_rows(x, fmt, power_of_2=power_of_2)
        assert torch.equal(amax, compute_amax(x))
        for block, operand in zip(((1, 0), (0, 1)), found, strict=True):
            wanted, _ = quantize_blocks(x, block, fmt, recipe)
            assert operand is not None and same(operand.data, wanted.data)
            assert torch.equal(operand.scale_inv, wanted.scale_inv)
    for block in TILES:
        mx = 32 in block
        recipe = Recipe(name="mxfp8" if mx else "blockwise", power_of_2_scales=True)
        operand, amax = cast_blocks(
            x, block, fmt, mx=mx, power_of_2=True, transposed=block[0] > block[1]
        )
        wanted, largest = quantize_blocks(x, block, fmt, recipe)
        assert torch.equal(amax, largest) and same(operand.data, wanted.data)
        assert same(operand.scale_inv, wanted.scale_inv)


def test_activation_and_norm() -> None:
    """Codes differ where a 16-bit value rounds the other way, which is rare."""
    needs_kernels()
    import torch.nn.functional as F

    from megafp8.numerics.kernels.fused import norm_cast, swiglu_backward_cast, swiglu_cast

    m, k, scale = 130, 257, torch.tensor(17.3, device=DEVICE)
    x, grad = torch.randn(m, 2 * k, device=DEVICE).bfloat16(), torch.randn(m, k, device=DEVICE)
    leaf = x.clone().requires_grad_(True)
    gate, up = leaf.chunk(2, -1)
    activated = F.silu(gate) * up
    activated.backward(grad.bfloat16())
    weight, bias = torch.randn(2, k, device=DEVICE).bfloat16()
    rows = x[:, :k]
    plain = {
        "swiglu": (swiglu_cast(x, scale, E4M3, transposed=True), activated),
        "gradient": (swiglu_backward_cast(grad.bfloat16(), x, scale, E4M3), leaf.grad),
        "RMSNorm": (norm_cast(rows, weight, None, 1e-5, scale, E4M3), rms(rows, weight)),
        "LayerNorm": (
            norm_cast(rows, weight, bias, 1e-5, scale, E4M3),
            F.layer_norm(rows.float(), (k,), weight.float(), bias.float(), 1e-5).bfloat16(),
        ),
    }
    for name, ((codes, *_), value) in plain.items():
        assert codes is not None and value is not None
        wanted = quantize(value, scale, E4M3).view(torch.uint8)
        different = (codes.view(torch.uint8) != wanted).float().mean()
        assert different < 0.01, (name, float(different))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    return (y * weight.float()).bfloat16()
