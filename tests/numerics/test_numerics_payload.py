"""Rows of FP8 codes with their scales: sizes, every case of an amax, sums in rank order."""

import pytest
import torch

from megafp8.config.wire import WIRE_BLOCK, payload_bytes
from megafp8.numerics import E4M3, E5M2, Fp8Format, decode_row, encode_rows, sum_rows

LARGE = 1e38


def there_and_back(x: torch.Tensor, fmt: Fp8Format = E4M3) -> torch.Tensor:
    payload = encode_rows(x, fmt)
    assert payload.dtype == torch.uint8 and payload.shape == (len(x), payload_bytes(x.shape[1]))
    return torch.stack([decode_row(row, x.shape[1], fmt) for row in payload])


@pytest.mark.parametrize(
    ("length", "wanted"),
    [(1, 8), (4, 8), (255, 260), (256, 260), (257, 268), (1024, 1040), (1 << 20, 260 << 12)],
)
def test_bytes_of_a_row(length: int, wanted: int) -> None:
    """4 bytes per block and one per value, filled up to a multiple of 4."""
    assert payload_bytes(length) == wanted


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "length", [1, 7, WIRE_BLOCK, 3 * WIRE_BLOCK + 5, (1 << 18) + WIRE_BLOCK + 2]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_block_has_the_scale_of_its_own_amax(
    fmt: Fp8Format, length: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = 10.0 ** torch.randint(-6, 6, (2, length // WIRE_BLOCK + 1), generator=generator)
    x = torch.randn(2, length, generator=generator)
    x = (x * sizes.repeat_interleave(WIRE_BLOCK, 1)[:, :length]).to(dtype)
    found = there_and_back(x, fmt)
    values = x.float()
    for first in range(0, length, WIRE_BLOCK):
        block, decoded = values[:, first : first + WIRE_BLOCK], found[:, first : first + WIRE_BLOCK]
        amax = block.abs().amax(1, keepdim=True)
        scale = torch.full_like(amax, fmt.max) / amax
        codes = (block * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype)
        wanted = codes.float() * scale.reciprocal()
        assert torch.equal(decoded, wanted), first
        # Nothing saturates: the largest value comes back as itself but for the division.
        assert torch.allclose(decoded.abs().amax(1, keepdim=True), amax, rtol=1e-6)
    assert torch.equal(found, there_and_back(x.t().contiguous().t(), fmt)), "any strides"


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_value_that_is_not_finite_arrives_as_nan(bad: float) -> None:
    x = torch.ones(1, 3 * WIRE_BLOCK)
    x[0, WIRE_BLOCK + 7] = bad
    found = there_and_back(x)[0]
    assert found.isnan().nonzero().flatten().tolist() == [WIRE_BLOCK + 7]
    assert bool((found[:WIRE_BLOCK] == 1).all() and (found[2 * WIRE_BLOCK :] == 1).all())
    others = found[WIRE_BLOCK : 2 * WIRE_BLOCK]
    assert bool((others[~others.isnan()] == 0).all()), "the rest of its block is not used"


def test_extreme_blocks() -> None:
    x = torch.zeros(1, 4 * WIRE_BLOCK)
    x[0, 1] = -0.0
    x[0, WIRE_BLOCK] = 1e-44  # a subnormal: the scale is the largest fp32
    x[0, 2 * WIRE_BLOCK] = LARGE
    x[0, 3 * WIRE_BLOCK] = 1e-30
    found = there_and_back(x)[0]
    assert bool((found[:WIRE_BLOCK] == 0).all()) and float(found[1].sign()) == 0.0
    assert found.isfinite().all()
    assert float(found[WIRE_BLOCK]) == pytest.approx(0.0, abs=1e-43)
    assert float(found[2 * WIRE_BLOCK]) == pytest.approx(LARGE, rel=1e-6)
    assert float(found[3 * WIRE_BLOCK]) == pytest.approx(1e-30, rel=1e-6)


def test_sums_are_taken_in_rank_order_with_the_own_part_uncast() -> None:
    generator = torch.Generator().manual_seed(4)
    parts = torch.randn(4, 700, generator=generator) * torch.tensor([[1e4], [1.0], [1e-3], [1.0]])
    payload = encode_rows(parts, E4M3)
    wanted = torch.zeros(700)
    for rank in range(4):
        wanted = wanted + (parts[2] if rank == 2 else decode_row(payload[rank], 700, E4M3))
    assert torch.equal(sum_rows(payload, parts[2], 2, E4M3), wanted)
    low = sum_rows(payload, parts[2].bfloat16(), 2, E4M3)
    assert low.dtype == torch.float32 and torch.allclose(low, wanted, rtol=1e-2, atol=1e-4)


def sqnr_db(x: torch.Tensor, fmt: Fp8Format) -> float:
    return float(20 * torch.log10(x.norm() / (x - there_and_back(x, fmt)).norm()))


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_e4m3_is_the_better_format_where_blocks_have_scales(spread: float) -> None:
    """6 dB, the mantissa bit more, as long as a block's values do not span many decades."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(4, 64 * WIRE_BLOCK, generator=generator)
    x *= torch.exp(spread * torch.randn(x.shape, generator=generator))
    assert sqnr_db(x, E4M3) > sqnr_db(x, E5M2) + 5.0
    assert sqnr_db(x, E4M3) > 30.0


def test_rows_of_nothing() -> None:
    payload = encode_rows(torch.empty(3, 0), E4M3)
    assert payload.shape == (3, 0) and decode_row(payload[0], 0, E4M3).shape == (0,)
    assert sum_rows(payload, torch.empty(0), 1, E4M3).shape == (0,)
