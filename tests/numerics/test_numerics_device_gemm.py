"""Which GPU multiplies which recipe, on pretended GPUs: what torch refuses is refused before it."""

from collections.abc import Callable, Iterator

import pytest
import torch

from megafp8.numerics import (
    E4M3,
    QuantizedTensor,
    Recipe,
    device_gemm,
    recipe_hardware,
    writes_fp32,
)

Pretend = Callable[[tuple[int, int], str], None]
CACHED = (device_gemm.fp8_hardware, device_gemm._has)
RECIPES = {
    "delayed": Recipe(),
    "tensorwise": Recipe(name="tensorwise"),
    "rowwise": Recipe(name="rowwise", gradient_format=E4M3),
    "rowwise_with_gw_hp": Recipe(name="rowwise_with_gw_hp", gradient_format=E4M3),
    "blockwise": Recipe(name="blockwise", power_of_2_scales=True, gradient_format=E4M3),
    "mxfp8": Recipe(name="mxfp8", power_of_2_scales=True, gradient_format=E4M3),
}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    def gpu(capability: tuple[int, int], cuda: str) -> None:
        for function in CACHED:
            function.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)

    yield gpu
    for function in CACHED:
        function.cache_clear()


@pytest.mark.parametrize(
    ("capability", "cuda", "native"),
    [
        ((8, 0), "13.0", ()),
        ((8, 9), "13.0", ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp")),
        ((9, 0), "12.8", ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp")),
        ((9, 0), "12.9", ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")),
        ((10, 0), "13.0", ("delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")),
        ((12, 0), "13.0", ("delayed", "tensorwise")),
    ],
)
def test_recipes_by_generation(
    pretend: Pretend, capability: tuple[int, int], cuda: str, native: tuple[str, ...]
) -> None:
    pretend(capability, cuda)
    for name, recipe in RECIPES.items():
        found, reason = recipe_hardware(recipe, "cuda")
        assert found == (name in native), (name, reason)
        assert "a GPU has compute capability" in reason or "torch was built for CUDA" in reason


def test_rows_are_multiplied_where_they_are_said_to_be(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device="meta")
    rows = QuantizedTensor(codes, torch.ones(16, 1, device="meta"), E4M3, block=(1, 0))
    whole = QuantizedTensor(codes, torch.ones((), device="meta"), E4M3)
    monkeypatch.setattr(QuantizedTensor, "data", property(lambda _: _OnCuda))
    for capability, wanted in (((9, 0), True), ((12, 0), False)):
        pretend(capability, "13.0")
        assert device_gemm.native(rows, rows) == wanted
        assert device_gemm.native(whole, whole)


class _OnCuda:
    device = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "cuda", "bf16"),
    [
        ((8, 9), "13.0", ("rowwise", "blockwise", "mxfp8")),
        ((9, 0), "12.8", ("rowwise", "blockwise", "mxfp8")),
        ((9, 0), "13.0", ("mxfp8",)),
        ((10, 0), "13.0", ("rowwise", "blockwise")),
    ],
)
def test_fp32_results_are_asked_for_where_a_kernel_writes_them(
    pretend: Pretend, capability: tuple[int, int], cuda: str, bf16: tuple[str, ...]
) -> None:
    """CUTLASS's kernels for rows write 16 bits; recipes that are emulated are as on a CPU."""
    pretend(capability, cuda)
    names = [name for name in RECIPES if name != "rowwise_with_gw_hp"]
    assert tuple(name for name in names if not writes_fp32(RECIPES[name], "cuda")) == bf16


def test_scales_of_rows_are_as_new_whatever_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks at strides of dimensions with one element too."""
    seen = []

    def product(left, right, *, scale_a, scale_b, **_):
        seen.append((scale_a.shape, scale_a.stride(), scale_b.shape, scale_b.stride()))
        return left.new_empty(left.shape[0], right.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    codes = torch.zeros(16, 32).to(torch.float8_e4m3fn)
    rows = QuantizedTensor(codes, torch.ones(16, 1), E4M3, block=(1, 0))
    columns = QuantizedTensor(codes, torch.ones(1, 32), E4M3, block=(0, 1))
    device_gemm.native_mm(rows, False, rows, True, torch.bfloat16, fast=True)
    device_gemm.native_mm(columns, True, columns, False, torch.bfloat16, fast=False)
    for (a, a_strides, b, b_strides), size in zip(seen, (16, 32), strict=True):
        assert (a, a_strides, b, b_strides) == ((size, 1), (1, 1), (1, size), (size, 1))
