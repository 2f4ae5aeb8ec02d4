"""The three products against float64, their dimensions and layouts."""

import numpy as np
import pytest
import torch

from megafp8.errors import PrecisionError
from megafp8.numerics import (
    E4M3,
    E5M2,
    QuantizedTensor,
    check_gemm_dims,
    compute_amax,
    dgrad,
    fp8_hardware,
    fprop,
    keep_decoded,
    quantize,
    wgrad,
)
from tests.support import reference


def cast(x: torch.Tensor, fmt, scale: float | None = None) -> QuantizedTensor:
    scale_ = fmt.max / compute_amax(x) if scale is None else torch.tensor(scale)
    return QuantizedTensor(quantize(x, scale_, fmt), 1 / scale_, fmt)


def operands(m: int, k: int, n: int, scale: float | None = None):
    x, w, dy = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    dtype = torch.bfloat16
    return (
        cast(x.to(dtype), E4M3, scale),
        cast(w.to(dtype), E4M3, scale),
        cast(dy.to(dtype), E5M2, scale),
    )


def raw(q: QuantizedTensor) -> np.ndarray:
    return q.data.view(torch.uint8).numpy()


def exact(a: QuantizedTensor, a_t: bool, b: QuantizedTensor, b_t: bool) -> np.ndarray:
    left, right = raw(a).T if a_t else raw(a), raw(b).T if b_t else raw(b)
    scale_inv = float(a.scale_inv) * float(b.scale_inv)
    return reference.gemm(left, a.format, right, b.format, scale_inv)


def products(x, w, dy, dtype=torch.bfloat16):
    return {
        "fprop": (fprop(x, w, dtype), exact(x, False, w, True)),
        "dgrad": (dgrad(dy, w, dtype), exact(dy, False, w, False)),
        "wgrad": (wgrad(dy, x, dtype), exact(dy, True, x, False)),
    }


SIZES = [(16, 16, 16), (48, 64, 32), (256, 128, 192), (16, 512, 16), (512, 256, 512)]


@pytest.mark.parametrize("size", SIZES)
def test_products_are_a_single_rounding_of_the_exact_result(size, each_cpu: str) -> None:
    for name, (found, expected) in products(*operands(*size)).items():
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape, name
        ulp = np.exp2(np.floor(np.log2(np.abs(expected).clip(1e-30))) - 7)
        # fp32 accumulation may move a value over a rounding boundary, and cancellation costs
        # relative to the largest partial sum; 2**-18 of the result's norm covers it.
        slack = ulp / 2 + np.abs(expected).max() * 2.0**-18
        error = np.abs(found.double().numpy() - expected)
        assert (error <= slack).all(), (name, (error / ulp).max())


@pytest.mark.parametrize("size", SIZES)
def test_power_of_two_scales_give_the_rounded_exact_product(size, each_cpu: str) -> None:
    """A coarse grid keeps every partial sum exact in fp32, so that only the last rounding acts."""
    m, k, n = size
    grid = lambda *shape: torch.randint(-8, 9, shape).to(torch.bfloat16) / 4  # noqa: E731
    for scale in (1.0, 0.25, 2.0**-40, 2.0**30):
        x, w = cast(grid(m, k), E4M3, 8.0), cast(grid(n, k), E4M3, 4.0)
        dy = cast(grid(m, n), E5M2, 2.0)
        w.scale_inv = torch.tensor(scale)
        for name, (found, expected) in products(x, w, dy).items():
            rounded = reference.to_bfloat16_grid(expected)
            np.testing.assert_array_equal(found.double().numpy(), rounded, err_msg=name)


@pytest.mark.parametrize("size", SIZES)
def test_fp32_results(size) -> None:
    for name, (found, expected) in products(*operands(*size), torch.float32).items():
        assert found.dtype == torch.float32
        error = np.abs(found.double().numpy() - expected).max()
        assert error <= 2.0**-18 * np.abs(expected).max(), name


def test_zero_gradient_gives_exact_zeros() -> None:
    x, w, _ = operands(32, 48, 64)
    dy = cast(torch.zeros(32, 64), E5M2, 1.0)
    assert not dgrad(dy, w).any() and not wgrad(dy, x).any()


def test_results_do_not_depend_on_uninitialised_memory() -> None:
    """The result buffer is scaled by beta=0: NaN left in freed memory must not show."""
    for size in ((16, 16, 16), (256, 128, 192)):
        x, w, dy = operands(*size)
        for _ in range(3):
            nan = torch.full((size[0], size[2]), float("nan"), dtype=torch.bfloat16)
            poison = [nan] + [nan.clone() for _ in range(3)]
            del poison, nan
            assert all(found.isfinite().all() for found, _ in products(x, w, dy).values())


def test_nan_codes_reach_the_result() -> None:
    x, w, dy = operands(16, 32, 48)
    x.data.view(torch.uint8)[3, 5] = 0x7F
    y = fprop(x, w)
    assert y[3].isnan().all() and y[torch.arange(16) != 3].isfinite().all()


def test_decoded_operands_are_kept_and_given_back(each_cpu: str) -> None:
    x, w, dy = operands(32, 48, 64)
    keep_decoded(w)
    kept = {"bf16": torch.bfloat16, "fp32": torch.float32}[each_cpu]
    assert w.decoded is not None and w.decoded.dtype == kept
    first = dgrad(dy, w)
    assert dy.decoded is not None  # for the wgrad that follows
    dw = wgrad(dy, x)
    assert dy.decoded is None and x.decoded is None
    fresh = QuantizedTensor(dy.data, dy.scale_inv, dy.format)
    assert torch.equal(wgrad(fresh, x), dw)
    assert torch.equal(dgrad(fresh, QuantizedTensor(w.data, w.scale_inv, w.format)), first)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((50, 712, 896), "linear_fc1: tokens 50 is not a multiple of 16"),
        ((64, 712, 896), "linear_fc1: in_features 712 is not a multiple of 16"),
        ((16, 32, 24), "linear_fc1: out_features 24 is not a multiple of 16"),
        ((1023, 16, 16), "linear_fc1: tokens 1023 is not a multiple of 16"),
        ((8, 16, 16), "linear_fc1: tokens 8 is not a multiple of 16"),
    ],
)
def test_dimensions_are_refused_by_name(dims, message: str) -> None:
    with pytest.raises(PrecisionError, match=f"^{message}$"):
        check_gemm_dims(*dims, name="linear_fc1")


def test_products_refuse_what_the_gpu_kernel_refuses() -> None:
    one = torch.tensor(1.0)
    data = lambda *shape: torch.zeros(shape).to(torch.float8_e4m3fn)  # noqa: E731
    q = lambda *shape: QuantizedTensor(data(*shape), one, E4M3)  # noqa: E731
    with pytest.raises(PrecisionError, match="fprop: tokens 17"):
        fprop(q(17, 32), q(16, 32))
    with pytest.raises(PrecisionError, match="dgrad: out_features 24"):
        dgrad(q(16, 24), q(24, 32))
    with pytest.raises(PrecisionError, match="wgrad: tokens 3 "):
        wgrad(q(3, 16), q(3, 32))
    check_gemm_dims(0, 16, 32)


def test_hardware_answer_has_a_reason() -> None:
    available, reason = fp8_hardware("cpu")
    assert not available and "cpu" in reason


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_native_products_agree_with_the_reference(size) -> None:
    available, reason = fp8_hardware("cuda")
    if not available:
        pytest.skip(reason)
    x, w, dy = operands(*size)
    on_gpu = [QuantizedTensor(q.data.cuda(), q.scale_inv.cuda(), q.format) for q in (x, w, dy)]
    found = fprop(*on_gpu[:2]), dgrad(on_gpu[2], on_gpu[1]), wgrad(on_gpu[2], on_gpu[0])
    for (_, expected), y in zip(products(x, w, dy).values(), found, strict=True):
        # Fast accumulation keeps about 14 bits.
        error = np.abs(y.double().cpu().numpy() - expected).max()
        assert error <= 2.0**-7 * np.abs(expected).max()


@pytest.mark.gpu
def test_casts_on_gpu_equal_casts_on_cpu() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()]
    for fmt in (E4M3, E5M2):
        for scale in (1.0, 99.7, 3e-5):
            here = quantize(x, torch.tensor(scale), fmt).view(torch.uint8)
            there = quantize(x.cuda(), torch.tensor(scale).cuda(), fmt).view(torch.uint8)
            assert torch.equal(here, there.cpu())
