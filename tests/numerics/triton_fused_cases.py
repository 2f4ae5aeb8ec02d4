"""Checks of the fused activation and norm kernels; see triton_cases.py."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.numerics import E4M3, E5M2, compute_amax, decode, quantize
from megafp8.numerics.kernels.fused import norm_cast, swiglu_backward_cast, swiglu_cast

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(3, 10), (65, 130), (16, 64)]
# fp32 exponentials and sums differ from torch's in the last bit, which can move a 16-bit rounding
# and then a code by one step.
MAY_DIFFER = 0.002


def sample(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).bfloat16()


def assert_codes(found: Tensor | None, want: Tensor) -> None:
    """Equal up to a step of one code in a few places."""
    assert found is not None and found.dtype == want.dtype and found.is_contiguous()
    a, b = (t.contiguous().view(torch.uint8).int() for t in (found, want))
    differs = a != b
    assert differs.float().mean() <= MAY_DIFFER, f"{int(differs.sum())} of {a.numel()} codes differ"
    assert int((a - b).abs().max()) <= 1


def assert_amax(amax: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(amax, compute_amax(want), rtol=2.0**-8, atol=0)


@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_swiglu_and_cast(m: int, k: int) -> None:
    x, scale, amax = sample(m, 2 * k), torch.tensor(20.0), torch.zeros(())
    gate, up = x.chunk(2, dim=-1)
    want = F.silu(gate) * up
    out, out_t = swiglu_cast(x, scale, E4M3, amax=amax, transposed=True)
    assert_codes(out, quantize(want, scale, E4M3))
    assert out is not None and out_t is not None
    assert torch.equal(out_t.view(torch.uint8), out.t().contiguous().view(torch.uint8))
    assert_amax(amax, want)


@pytest.mark.parametrize(("m", "k"), SHAPES)
def test_gradient_of_swiglu_and_cast(m: int, k: int) -> None:
    x, grad = sample(m, 2 * k), sample(m, k, seed=1)
    scale, amax = torch.tensor(500.0), torch.zeros(())
    gate, up = x.chunk(2, dim=-1)
    dgate = torch.ops.aten.silu_backward(grad * up, gate)
    want = torch.cat((dgate, grad * F.silu(gate)), dim=-1)
    out, out_t = swiglu_backward_cast(grad, x, scale, E5M2, amax=amax, transposed=True)
    assert_codes(out, quantize(want, scale, E5M2))
    assert out is not None and out_t is not None
    assert torch.equal(out_t.view(torch.uint8), out.t().contiguous().view(torch.uint8))
    assert_amax(amax, want)


@pytest.mark.parametrize("bias", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize(("m", "k"), [*SHAPES, (3, 1500)])
def test_norm_and_cast(m: int, k: int, bias: bool) -> None:
    x, weight = sample(m, k), sample(k, seed=1)
    shift = sample(k, seed=2) if bias else None
    scale, amax = torch.tensor(11.0), torch.zeros(())
    x32 = x.float()
    if shift is None:
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-5)
        want = (x32 * rstd * weight.float()).bfloat16()
    else:
        want = F.layer_norm(x32, (k,), weight.float(), shift.float(), 1e-5).bfloat16()
        rstd = torch.rsqrt(x32.var(-1, unbiased=False, keepdim=True) + 1e-5)
    out, out_t, mean, found = norm_cast(
        x, weight, shift, 1e-5, scale, E4M3, amax=amax, transposed=True
    )
    assert_codes(out, quantize(want, scale, E4M3))
    assert out is not None and out_t is not None
    assert torch.equal(out_t.view(torch.uint8), out.t().contiguous().view(torch.uint8))
    assert_amax(amax, want)
    torch.testing.assert_close(found, rstd[:, 0])
    assert (mean is not None) == bias
    if mean is not None:
        torch.testing.assert_close(mean, x32.mean(-1), atol=1e-5, rtol=1e-5)


def test_nan_and_inf_show_in_the_amax_and_empty_stays_empty() -> None:
    x, scale = sample(4, 32), torch.tensor(1.0)
    for value, check in ((float("inf"), torch.isinf), (float("nan"), torch.isnan)):
        y, amax = x.clone(), torch.zeros(())
        y[2, 20] = value  # in `up`
        out, _ = swiglu_cast(y, scale, E4M3, amax=amax)
        assert check(amax) and out is not None
        saturated = decode(out)[2, 4].abs()
        assert saturated == 448 if value == float("inf") else saturated.isnan()
    amax = torch.tensor(2.0)
    out, _ = swiglu_cast(x[:0], scale, E4M3, amax=amax)
    grads, _ = swiglu_backward_cast(x[:0, :16], x[:0], scale, E5M2, amax=amax)
    normed, _, _, rstd = norm_cast(x[:0], x[0], None, 1e-5, scale, E4M3, amax=amax)
    assert out is not None and grads is not None and normed is not None
    assert out.shape == (0, 16) and grads.shape == normed.shape == (0, 32) and amax == 2.0
    assert rstd.shape == (0,)


def test_strided_rows_are_legal() -> None:
    wide, scale = sample(20, 200), torch.tensor(5.0)
    for x in (wide[:, 10:110], wide.t()[:100, :10]):
        found, plain = (swiglu_cast(t, scale, E4M3)[0] for t in (x, x.contiguous()))
        assert found is not None and plain is not None
        assert torch.equal(found.view(torch.uint8), plain.view(torch.uint8))
