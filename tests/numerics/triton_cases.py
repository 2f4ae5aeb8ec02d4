"""Checks of the Triton kernels, run by test_triton_kernels.py in an interpreter of their own.

TRITON_INTERPRET has to be set before Triton is imported, and then holds for the whole process.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.numerics import E4M3, E5M2, Fp8Format, compute_amax, quantize
from megafp8.numerics.kernels import cast as cast_module
from megafp8.numerics.kernels.cast import cast, record_amax
from tests.support import reference

# The interpreter computes in NumPy, which warns of overflow where hardware gives inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def special(fmt: Fp8Format) -> Tensor:
    """All values of a format, midpoints and their neighbours, both signs of zero, fp32 subnormals,
    values beyond the largest, inf and NaN."""
    values = np.unique(reference.code_values(fmt)[np.isfinite(reference.code_values(fmt))])
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(side)) for side in (np.inf, -np.inf)]
    odd = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 3e38, -3e38, 61440, np.inf, -np.inf, np.nan, -np.nan]
    parts = [values.astype(np.float32), middle, *near, np.array(odd, np.float32)]
    return torch.from_numpy(np.concatenate(parts))


def wanted(x: Tensor, scale: float, fmt: Fp8Format) -> np.ndarray:
    return reference.quantize(x.float().numpy(), scale, fmt)


def codes_of(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None and tensor.is_contiguous()
    return tensor.view(torch.uint8).numpy()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_are_cast_as_the_reference_casts(fmt: Fp8Format, dtype: torch.dtype) -> None:
    x = special(fmt).to(dtype)[None]
    for scale in (1.0, 0.37, 2.0**-20, 3e30):
        out, out_t = cast(x, torch.tensor(scale), fmt, transposed=True)
        nan = x.isnan().numpy()  # its sign is lost on the way from fp16, and says nothing
        assert (codes_of(out)[nan] & 0x7F == 0x7F).all() and nan.sum() == 2
        np.testing.assert_array_equal(codes_of(out)[~nan], wanted(x, scale, fmt)[~nan])
        np.testing.assert_array_equal(codes_of(out_t), codes_of(out).T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (65, 7), (67, 129), (16, 32)])
def test_odd_sizes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    amax = torch.zeros(())
    out, out_t = cast(x, torch.tensor(100.7), E4M3, amax=amax, transposed=True)
    np.testing.assert_array_equal(codes_of(out), wanted(x, 100.7, E4M3))
    np.testing.assert_array_equal(codes_of(out_t), codes_of(out).T)
    assert torch.equal(amax, compute_amax(x))
    assert torch.equal(codes_tensor(out), codes_tensor(quantize(x, torch.tensor(100.7), E4M3)))


def codes_tensor(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded", "stepped"])
def test_any_strides_give_the_contiguous_result(layout: str) -> None:
    base = torch.randn(70, 140, generator=torch.Generator().manual_seed(2)).bfloat16()
    x = {
        "transposed": base.t(),
        "sliced": base[3:60, 5:100],
        "expanded": base[:1].expand(20, 140),
        "stepped": base[::2, ::3],
    }[layout]
    found, plain = (cast(t, torch.tensor(9.0), E5M2, transposed=True) for t in (x, x.contiguous()))
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(codes_of(one), codes_of(other))


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        (0.0, 0.0, 0.0),
        (-0.0, 0.0, 0.0),
        (-3.0, 2.0, 3.0),
        (1.0, 2.0, 2.0),
        (1e-40, 0.0, 1e-40),
        (float("inf"), 5.0, float("inf")),
        (float("-inf"), 5.0, float("inf")),
        (float("nan"), float("inf"), float("nan")),
        (1.0, float("nan"), float("nan")),
        (float("inf"), float("nan"), float("nan")),
    ],
)
def test_amax_is_a_running_maximum_in_which_nan_wins(
    value: float, before: float, after: float
) -> None:
    x = torch.zeros(70, 150)
    x[66, 140] = value
    slots = torch.tensor([7.0, before, 7.0])
    cast(x, torch.tensor(1.0), E4M3, amax=slots[1])
    want = torch.tensor([7.0, after, 7.0])
    assert torch.equal(slots, want) or (slots[1].isnan() and want[1].isnan())
    assert slots[0] == slots[2] == 7.0
    assert not torch.signbit(slots[1])
    alone = torch.tensor(before)
    record_amax(x.view(7, 10, 150), alone)
    assert torch.equal(alone, slots[1]) or (alone.isnan() and slots[1].isnan())


def test_nan_beside_inf_in_one_tensor_is_nan() -> None:
    x, amax = torch.ones(4, 4), torch.zeros(())
    x[0, 0], x[1, 1] = float("inf"), float("nan")
    cast(x, torch.tensor(1.0), E4M3, amax=amax)
    assert amax.isnan()


@pytest.mark.parametrize(
    "values",
    [[float("nan"), 7.0], [-7.0, float("nan"), 0.5], [float("nan")], [float("inf"), float("nan")]],
)
def test_an_amax_without_nan(values: list[float]) -> None:
    x = torch.zeros(70, 150)
    x[3, : len(values)] = torch.tensor(values)
    amax = torch.tensor(2.0)
    cast(x, torch.tensor(1.0), E4M3, amax=amax, drop_nan=True)
    assert torch.equal(amax, torch.maximum(torch.tensor(2.0), compute_amax(x, drop_nan=True)))


def test_only_what_is_wanted_is_made() -> None:
    x, amax = torch.ones(16, 32).bfloat16(), torch.zeros(())
    out, out_t = cast(x, torch.tensor(2.0), E4M3, codes=False, transposed=True)
    assert out is None and out_t is not None and out_t.shape == (32, 16)
    out, out_t = cast(x, torch.tensor(2.0), E4M3, amax=amax, codes=False)
    assert out is None and out_t is None and amax == 1.0


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_empty_tensors_leave_the_amax(shape: tuple[int, int]) -> None:
    amax = torch.tensor(3.0)
    out, out_t = cast(torch.zeros(shape), torch.tensor(1.0), E4M3, amax=amax, transposed=True)
    assert out is not None and out_t is not None
    assert out.shape == shape and out_t.shape == shape[::-1] and amax == 3.0


def test_input_is_not_written() -> None:
    x = torch.randn(20, 20)
    copy = x.clone()
    cast(x, torch.tensor(3.0), E4M3, amax=torch.zeros(()), transposed=True)
    assert torch.equal(x, copy)
    assert cast_module.BLOCK_M < 70 and cast_module.BLOCK_K < 140, "the cases above cross tiles"
