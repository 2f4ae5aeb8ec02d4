"""The fused kernels on a CUDA device: codes, amaxes and transposed copies of plain torch.

Imports what a machine with torch, Triton and pytest alone has.
"""

import pytest
import torch
from torch import Tensor

from megafp8.numerics import E4M3, E5M2, Fp8Format, compute_amax, fp8_hardware, quantize
from megafp8.numerics.kernels import choose_kernels

pytestmark = pytest.mark.gpu


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
