"""Casts against the exact reference: every bf16 value, edge values, strides, decoding."""

import numpy as np
import pytest
import torch

from megafp8.numerics import E4M3, E5M2, QuantizedTensor, compute_amax, decode, quantize
from tests.support import reference

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
SCALES = (1.0, 0.5, 99.7, 1.1754944e-38, 3.4028235e38, 3e-5, 1e-40, 448.0 / 3.0)


def codes(x: torch.Tensor, scale: float, fmt) -> np.ndarray:
    return quantize(x, torch.tensor(scale), fmt).view(torch.uint8).numpy()


def is_nan_code(code: np.ndarray, fmt) -> np.ndarray:
    return np.isnan(reference.code_values(fmt))[code]


def assert_codes_equal(x: torch.Tensor, scale: float, fmt) -> None:
    found = codes(x, scale, fmt).reshape(-1)
    expected = reference.quantize(x.float().reshape(-1).numpy(), scale, fmt)
    nan = x.isnan().reshape(-1).numpy()
    assert is_nan_code(found, fmt)[nan].all()
    different = np.flatnonzero((found != expected) & ~nan)
    first = different[:1]
    assert different.size == 0, (
        f"{different.size} codes differ; first: x {x.reshape(-1)[first].tolist()} scale {scale} "
        f"found {found[first]} expected {expected[first]}"
    )


def every_bf16() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@FORMATS
@pytest.mark.parametrize("scale", SCALES)
def test_every_bf16_value(fmt, scale: float) -> None:
    assert_codes_equal(every_bf16(), scale, fmt)


@FORMATS
@pytest.mark.parametrize("scale", [1.0, 99.7, 1e-3])
def test_random_fp32_and_fp16(fmt, scale: float) -> None:
    # 300,000 elements: more than one chunk, with a ragged last one.
    x = torch.randn(300_000) * torch.exp2(torch.randint(-20, 20, (300_000,)).float())
    assert_codes_equal(x, scale, fmt)
    assert_codes_equal(x[:5000].clamp(-60000, 60000).half(), scale, fmt)


@FORMATS
def test_ties_go_to_the_even_code(fmt) -> None:
    values = reference.code_values(fmt)[: fmt.max_code + 1]
    middle = (values[:-1] + values[1:]) / 2
    x = torch.tensor(np.concatenate([middle, -middle]), dtype=torch.float32)
    assert_codes_equal(x, 1.0, fmt)
    assert (codes(x, 1.0, fmt) % 2 == 0).all()
    assert_codes_equal(torch.nextafter(x, x * 2), 1.0, fmt)
    assert_codes_equal(torch.nextafter(x, x * 0), 1.0, fmt)


def test_edge_values_e4m3() -> None:
    inf, nan = float("inf"), float("nan")
    x = [447, 448, 449, 464, 465, 1000, -1000, inf, -inf, nan, -0.0]
    x += [2**-9, 2**-10, 3 * 2**-10, 2**-7]
    expected = [0x7E] * 6 + [0xFE, 0x7E, 0xFE, 0x7F, 0x80, 0x01, 0x00, 0x02, 0x04]
    assert codes(torch.tensor(x), 1.0, E4M3).tolist() == expected
    assert torch.isnan(compute_amax(torch.tensor(x)))
    assert compute_amax(torch.tensor([1.0, -inf])) == inf


def test_edge_values_e5m2() -> None:
    inf, nan = float("inf"), float("nan")
    x = [57344, 61439, 61440, 65536, -1e6, inf, -0.0, 2**-16, 2**-17, 3 * 2**-17]
    expected = [0x7B] * 4 + [0xFB, 0x7B, 0x80, 0x01, 0x00, 0x02]
    assert codes(torch.tensor(x), 1.0, E5M2).tolist() == expected
    assert is_nan_code(codes(torch.tensor([nan]), 1.0, E5M2), E5M2).all()


@FORMATS
def test_zero_tensors_and_zero_rows(fmt) -> None:
    zero = torch.zeros(16, 32, dtype=torch.bfloat16)
    assert compute_amax(zero) == 0
    assert not codes(zero, 3.3, fmt).any()
    assert (codes(-zero, 3.3, fmt) == 0x80).all()
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    whole = codes(x, 3.3, fmt)
    x[3] = 0
    with_dead_row = codes(x, 3.3, fmt)
    assert not with_dead_row[3].any()
    alive = np.arange(16) != 3
    assert (with_dead_row[alive] == whole[alive]).all()


def test_outlier_under_a_stale_scale_saturates() -> None:
    x = torch.tensor([0.5, 100.0])
    q = QuantizedTensor(quantize(x, torch.tensor(448.0), E4M3), torch.tensor(1 / 448.0), E4M3)
    assert q.dequantize(torch.float32).tolist() == [0.5, 1.0]


def strided() -> dict[str, torch.Tensor]:
    return {
        "transposed": torch.randn(32, 16).t(),
        "sliced": torch.randn(2, 8, 32)[:, 3:, :],
        "expanded": torch.ones(1, 24).expand(16, 24),
        "stepped": torch.randn(64, 9)[::2, 1::3],
        "one element expanded": torch.tensor([3.0]).expand(5),
        "large transposed": torch.randn(700, 600).t(),
    }


@FORMATS
@pytest.mark.parametrize("name", list(strided()))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_strides_give_the_same_bytes(fmt, name: str, dtype: torch.dtype) -> None:
    x = strided()[name].to(dtype)
    before = x.clone()
    scale = torch.tensor(17.3)
    found, expected = quantize(x, scale, fmt), quantize(x.contiguous(), scale, fmt)
    assert found.is_contiguous() and found.shape == x.shape
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(compute_amax(x), compute_amax(x.contiguous()))
    assert torch.equal(x, before)  # an fp32 input is not scaled in place
    turned = found.transpose(0, -1)
    assert torch.equal(decode(turned).transpose(0, -1), decode(found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1, 7, 16, 33, 1000])
def test_amax_sees_nan_and_inf_at_every_position(dtype: torch.dtype, size: int) -> None:
    for position in {0, size // 2, size - 1}:
        x = torch.randn(size).to(dtype)
        assert compute_amax(x) == x.float().abs().max()
        x[position] = -float("inf")
        assert compute_amax(x) == float("inf")
        x[(position + 1) % size] = float("nan")
        assert torch.isnan(compute_amax(x))


def test_amax_of_empty_and_negative_zero() -> None:
    empty = compute_amax(torch.empty(0, 16, dtype=torch.bfloat16))
    assert empty == 0 and empty.dtype == torch.float32 and empty.dim() == 0
    amax = compute_amax(torch.full((4,), -0.0))
    assert amax == 0 and not torch.signbit(amax)
    assert quantize(torch.empty(0, 16), torch.tensor(1.0), E4M3).shape == (0, 16)


@FORMATS
def test_decoding_is_exact_for_every_code(fmt) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = reference.code_values(fmt)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = decode(every.view(fmt.dtype), dtype)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.double().numpy(), expected)
    signs = torch.signbit(decode(every.view(fmt.dtype))).numpy()
    finite = ~np.isnan(expected)
    assert (signs == (np.arange(256) >= 128))[finite].all()


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decoding_pairs_odd_sizes_and_offsets(fmt, dtype) -> None:
    every_pair = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(fmt.dtype)
    expected = torch.tensor(reference.code_values(fmt))[every_pair.view(torch.uint8).long()]

    def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return torch.equal(found.double().nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))

    parts = (slice(None), slice(1, None), slice(None, -1), slice(1, -1), slice(0), 3)
    for part in parts:
        assert same(decode(every_pair[part], dtype), expected[part])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_large_decode_is_the_same_on_any_number_of_threads(
    threads: int, dtype: torch.dtype
) -> None:
    q = quantize(torch.randn(1100, 1024), torch.tensor(99.7), E4M3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = decode(q, dtype)
    finally:
        torch.set_num_threads(before)
    assert found.dtype == dtype and torch.equal(found, q.to(dtype))


@FORMATS
def test_format_constants(fmt) -> None:
    finite = reference.code_values(fmt)[: fmt.max_code + 1]
    assert finite[fmt.max_code] == fmt.max
    assert finite[1] == fmt.smallest_subnormal
    assert finite[1 << fmt.mantissa_bits] == fmt.smallest_normal
    assert float(torch.finfo(fmt.dtype).max) == fmt.max
