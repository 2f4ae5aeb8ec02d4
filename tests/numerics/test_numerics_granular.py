"""Casts by row and block, and products of what they make, against the exact reference."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from megafp8.numerics import (
    E4M3,
    E5M2,
    QuantizedTensor,
    Recipe,
    block_amax,
    compute_amax,
    dgrad,
    fprop,
    keep_decoded,
    quantize_blocks,
    quantize_tensor,
    recipe_hardware,
    wgrad,
)
from megafp8.numerics.device_gemm import native_mm, swizzled
from megafp8.numerics.statistics import count, summarize
from tests.support import reference

RECIPES = {
    "rowwise": Recipe(name="rowwise"),
    "rowwise, powers of 2": Recipe(name="rowwise", power_of_2_scales=True),
    "blockwise": Recipe(name="blockwise", power_of_2_scales=True),
    "blockwise, fp32": Recipe(name="blockwise"),
    "mxfp8": Recipe(name="mxfp8", power_of_2_scales=True),
}
EACH = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
BLOCKS = {"rowwise": [(1, 0), (0, 1)], "blockwise": [(1, 128), (128, 1), (128, 128)]}
BLOCKS["mxfp8"] = [(1, 32), (32, 1)]


def raw(data: Tensor) -> np.ndarray:
    return data.contiguous().view(torch.uint8).numpy()


def assert_equals_reference(x: Tensor, block: tuple[int, int], fmt, recipe: Recipe) -> None:
    found, amax = quantize_blocks(x, block, fmt, recipe)
    codes, scale_inv = reference.quantize_blocks(
        x.float().numpy(), block, fmt, recipe.spec.e8m0, recipe.power_of_2_scales
    )
    finite = ~np.isnan(reference.code_values(fmt)[codes])
    np.testing.assert_array_equal(raw(found.data)[finite], codes[finite])
    assert np.isnan(reference.code_values(fmt)[raw(found.data)][~finite]).all()
    np.testing.assert_array_equal(found.spread_scale_inv().double().numpy(), scale_inv + 0 * codes)
    assert torch.equal(amax, compute_amax(x)) or bool(amax.isnan() & x.isnan().any())


def outliers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Sizes that move by powers of ten over rows and columns, a dead row and a dead column."""
    x = torch.randn(rows, columns)
    x *= 10.0 ** torch.randint(-6, 6, (rows, 1)) * 10.0 ** torch.randint(-3, 3, (1, columns))
    x[rows // 2] = 0.0
    x[:, columns // 3] = -0.0
    return x.to(dtype)


@EACH
@FORMATS
@pytest.mark.parametrize("size", [(128, 128), (256, 384), (33, 70), (1, 1), (130, 5)])
def test_casts_equal_the_reference_with_smaller_blocks_at_the_edges(recipe, fmt, size) -> None:
    for block in BLOCKS[recipe.name]:
        for dtype in (torch.bfloat16, torch.float32):
            assert_equals_reference(outliers(*size, dtype), block, fmt, recipe)


def awkward_values() -> dict[str, Tensor]:
    """fp32 [17, 33]: tensors all of whose blocks are at an end of some range, or beyond it."""
    x = torch.randn(17, 33, generator=torch.Generator().manual_seed(3))
    ends = torch.tensor([448.0, 449.0, -464.0, 57344.0, 61440.0, -65504.0, 2.0**-9, 3 * 2.0**-17])
    return {
        "subnormal": x * 1e-40,
        "smallest": x * 2.0**-120,
        "largest": x.clamp(-3.3, 3.3) * 1e38,
        "one value": torch.full_like(x, 448.0),
        "negative zero": torch.full_like(x, -0.0),
        "an outlier": x.index_fill(1, torch.tensor([7]), 0.0).index_fill(0, torch.tensor([2]), 3e4),
        "ends": ends.repeat(71)[: x.numel()].view_as(x),
        "inf": x.index_fill(0, torch.tensor([16]), -torch.inf),
        "nan": x.index_fill(1, torch.tensor([32]), torch.nan),
        "all inf": torch.full_like(x, torch.inf),
        "all nan": torch.full_like(x, torch.nan),
    }


@EACH
@FORMATS
@pytest.mark.parametrize("name", awkward_values())
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_awkward_values_in_every_type(recipe, fmt, name) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = awkward_values()[name].to(dtype)
        for block in BLOCKS[recipe.name]:
            assert_equals_reference(x, block, fmt, recipe)
            found, _ = quantize_blocks(x, block, fmt, recipe)
            assert not found.spread_scale_inv().isinf().any()
            if x.isfinite().all():
                assert found.dequantize(torch.float32).isfinite().all()


@EACH
def test_a_large_cast_is_made_in_chunks_of_the_same_bytes(recipe) -> None:
    x = outliers(1300, 520)  # more than two chunks, with ragged blocks in the last
    for block in BLOCKS[recipe.name]:
        whole, _ = quantize_blocks(x, block, E4M3, recipe)
        half = 640 if block[0] else None
        if half is not None:
            top, _ = quantize_blocks(x[:half], block, E4M3, recipe)
            assert np.array_equal(raw(top.data), raw(whole.data[:half]))
        else:
            left, _ = quantize_blocks(x[:, :200], block, E4M3, recipe)
            assert np.array_equal(raw(left.data), raw(whole.data[:, :200]))
        scaled = whole.dequantize(torch.float32)
        assert (scaled - x.float()).abs().max() <= x.float().abs().max() * 0.07


@EACH
@FORMATS
def test_nothing_saturates_whose_amax_is_known(recipe, fmt) -> None:
    x = outliers(256, 256)
    for block in BLOCKS[recipe.name]:
        cast, _ = quantize_blocks(x, block, fmt, recipe)
        if recipe.power_of_2_scales:  # else 448 * (1 / (448 / amax)) may be below amax
            assert summarize(count(x, cast))["saturation"] == 0.0
        # Powers of two leave up to one bit of the range unused.
        values = torch.from_numpy(reference.code_values(fmt)[raw(cast.data)]).abs()
        assert float(values.max()) > fmt.max / 2


@EACH
@FORMATS
def test_zeros_and_a_dead_row(recipe, fmt) -> None:
    for block in BLOCKS[recipe.name]:
        for fill, code in ((0.0, 0x00), (-0.0, 0x80)):
            cast, amax = quantize_blocks(torch.full((64, 32), fill), block, fmt, recipe)
            assert (raw(cast.data) == code).all() and amax == 0
            assert not cast.dequantize().any() and cast.scale_inv.float().isfinite().all()
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    whole, _ = quantize_blocks(x, (1, 32), fmt, recipe)
    x[3] = 0.0
    cast, _ = quantize_blocks(x, (1, 32), fmt, recipe)
    alive = np.arange(16) != 3
    assert not raw(cast.data)[3].any()
    assert np.array_equal(raw(cast.data)[alive], raw(whole.data)[alive])
    assert torch.equal(cast.dequantize()[alive], whole.dequantize()[alive])


@EACH
@FORMATS
def test_inf_and_nan_stay_in_their_block_and_show_in_the_amax(recipe, fmt) -> None:
    size = (256, 160)
    x = outliers(*size, torch.float32)
    clean = x.clone()
    for bad in (torch.inf, -torch.inf, torch.nan):
        x[5, 7] = bad
        for block in BLOCKS[recipe.name]:
            cast, amax = quantize_blocks(x, block, fmt, recipe)
            assert amax.isnan() if np.isnan(bad) else amax == torch.inf
            wanted, _ = quantize_blocks(clean, block, fmt, recipe)
            r, c = block[0] or size[0], block[1] or size[1]
            mine = np.zeros(size, bool)
            mine[5 // r * r : 5 // r * r + r, 7 // c * c : 7 // c * c + c] = True
            assert (raw(cast.data) == raw(wanted.data))[~mine].all()
            value = reference.code_values(fmt)[raw(cast.data)[5, 7]]
            assert np.isnan(value) if np.isnan(bad) else abs(value) == fmt.max
    # The codes of the whole block, as the reference has them.
    assert_equals_reference(x, BLOCKS[recipe.name][0], fmt, recipe)


def strided() -> dict[str, Tensor]:
    return {
        "transposed": torch.randn(128, 256).t(),
        "sliced": torch.randn(2, 160, 128)[:, 32:, :].flatten(0, 1),
        "expanded": torch.ones(1, 128).expand(256, 128),
        "stepped": torch.randn(256, 384)[::2, 1::3],
    }


@EACH
@pytest.mark.parametrize("kind", list(strided()))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_strides_give_the_same_bytes(recipe, kind, dtype) -> None:
    x = strided()[kind].to(dtype)
    if kind == "expanded":
        x = strided()[kind][:1].to(dtype).expand(256, 128)
    before = x.clone()
    for block in BLOCKS[recipe.name]:
        found, amax = quantize_blocks(x, block, E4M3, recipe)
        wanted, other = quantize_blocks(x.contiguous(), block, E4M3, recipe)
        assert found.data.is_contiguous()
        assert np.array_equal(raw(found.data), raw(wanted.data))
        assert np.array_equal(raw(found.scale_inv), raw(wanted.scale_inv))
        assert torch.equal(amax, other)
    assert torch.equal(x, before)


def test_block_amax_of_nothing() -> None:
    assert block_amax(torch.empty(0, 64), (1, 32)).shape == (0, 2)
    assert block_amax(torch.empty(0, 64), (0, 1)).shape == (1, 64)
    assert block_amax(torch.empty(0, 64), (1, 0)).shape == (0, 1)
    cast, amax = quantize_blocks(torch.empty(0, 64), (1, 32), E4M3, RECIPES["mxfp8"])
    assert cast.data.shape == (0, 64) and amax == 0


def test_one_scale_for_parts_of_a_tensor_gives_the_codes_of_the_whole() -> None:
    x = torch.randn(64, 48).bfloat16()
    whole = quantize_tensor(x, E4M3, compute_amax(x), False)
    parts = [quantize_tensor(part, E4M3, compute_amax(x), False) for part in x.split(32)]
    assert np.array_equal(raw(whole.data), np.concatenate([raw(part.data) for part in parts]))
    assert float(whole.scale_inv) == float(np.float32(1) / (np.float32(448) / x.abs().max().item()))


def operands(
    recipe: Recipe, m: int, k: int, n: int, gradient=E4M3
) -> dict[str, tuple[QuantizedTensor, QuantizedTensor]]:
    """The operands of the three products, from one x, w and dy."""
    x, w, dy = outliers(m, k), outliers(n, k), outliers(m, n)

    def cast(tensor: Tensor, block: tuple[int, int], fmt=E4M3) -> QuantizedTensor:
        return quantize_blocks(tensor, block, fmt, recipe)[0]

    across, along = (recipe.spec.block("input", axis) for axis in ("features", "tokens"))
    rows, columns = (recipe.spec.block("weight", axis) for axis in ("features", "tokens"))
    return {
        "fprop": (cast(x, across), cast(w, rows)),
        "dgrad": (cast(dy, across, gradient), cast(w, columns)),
        "wgrad": (cast(dy, along, gradient), cast(x, along)),
    }


PRODUCTS = {"fprop": (fprop, False, True), "dgrad": (dgrad, False, False)}
PRODUCTS["wgrad"] = (wgrad, True, False)


@EACH
@pytest.mark.parametrize("size", [(128, 128, 128), (256, 128, 384)])
@pytest.mark.parametrize("gradient", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_products_are_a_rounding_of_the_exact_result(recipe, size, gradient) -> None:
    for name, (a, b) in operands(recipe, *size, gradient).items():
        product, a_t, b_t = PRODUCTS[name]
        left, right = (raw(q.data) for q in (a, b))
        left_scale, right_scale = (q.spread_scale_inv().double().numpy() for q in (a, b))
        left_scale, right_scale = left_scale + 0.0 * left, right_scale + 0.0 * right
        if a_t:
            left, left_scale = left.T, left_scale.T
        if b_t:
            right, right_scale = right.T, right_scale.T
        exact = reference.scaled_gemm(left, left_scale, a.format, right, right_scale, b.format)
        # What fp32 accumulation may lose, in terms of the sum of magnitudes.
        values = (np.abs(reference.code_values(a.format)[left]) * left_scale) @ (
            np.abs(reference.code_values(b.format)[right]) * right_scale
        )
        # Factors of rows are applied to the bf16 product: half an ulp before it, which may be a
        # whole one after, and half an ulp again.
        factor_last = recipe.name == "rowwise" and not recipe.power_of_2_scales
        for dtype, ulps in ((torch.bfloat16, 1.51 if factor_last else 0.51), (torch.float32, 0.0)):
            found = product(a, b, dtype)
            assert found.dtype == dtype and found.shape == exact.shape
            ulp = np.exp2(np.floor(np.log2(np.abs(exact).clip(1e-30))) - 7)
            error = np.abs(found.double().numpy() - exact)
            assert (error <= ulps * ulp + values * 2.0**-18).all(), (name, dtype)


@EACH
def test_a_kept_decoded_weight_gives_the_same_product(recipe) -> None:
    x, w = operands(recipe, 128, 256, 128)["fprop"]
    wanted = fprop(x, w)
    keep_decoded(w)
    assert w.decoded is not None
    assert torch.equal(fprop(x, w), wanted) and torch.equal(fprop(x, w), wanted)


@EACH
def test_a_zero_gradient_gives_exact_zeros(recipe) -> None:
    dy = torch.zeros(128, 128)
    for name, (_, b) in operands(recipe, 128, 128, 128).items():
        block = recipe.spec.block("grad_output", "tokens" if name == "wgrad" else "features")
        zero, _ = quantize_blocks(dy, block, E5M2, recipe)
        if name != "fprop":
            assert not PRODUCTS[name][0](zero, b).any()


def test_swizzled_scales_are_where_the_kernel_looks_for_them() -> None:
    rows, columns = 200, 6
    scales = torch.arange(rows * columns).remainder(251).to(torch.uint8).view(rows, columns)
    flat = swizzled(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert flat.numel() == 256 * 8
    # cuBLAS: offset of (row, column) within its tile of 128 x 4; tiles row by row.
    for row in range(0, rows, 7):
        for column in range(columns):
            tile = (row // 128) * 2 + column // 4
            inside = (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            assert flat[tile * 512 + inside] == scales[row, column]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("size", [(128, 128, 128), (256, 384, 640)])
def test_layouts_for_gpu_kernels_pass_torchs_own_checks(recipe: str, size) -> None:
    """On the meta device torch checks dtypes, shapes and strides as before a kernel."""
    for name, pair in operands(Recipe(name=recipe, power_of_2_scales=True), *size).items():
        a, b = (
            dataclasses.replace(q, data=q.data.to("meta"), scale_inv=q.scale_inv.to("meta"))
            for q in pair
        )
        _, a_t, b_t = PRODUCTS[name]
        found = native_mm(a, a_t, b, b_t, torch.bfloat16, fast=False)
        assert found.shape == PRODUCTS[name][0](*pair).shape and found.dtype == torch.bfloat16


def test_hardware_answer_has_a_reason() -> None:
    for recipe in RECIPES.values():
        available, reason = recipe_hardware(recipe, "cpu")
        assert not available and "cpu" in reason


@pytest.mark.gpu
@EACH
def test_native_products_agree_with_emulated_ones(recipe) -> None:
    available, reason = recipe_hardware(recipe, "cuda")
    if not available:
        pytest.skip(reason)
    for name, (a, b) in operands(recipe, 256, 384, 512).items():
        on_gpu = [
            QuantizedTensor(
                q.data.cuda(), q.scale_inv.cuda(), q.format, None, q.block, q.power_of_2
            )
            for q in (a, b)
        ]
        wanted = PRODUCTS[name][0](a, b).float()
        found = PRODUCTS[name][0](*on_gpu).float().cpu()
        assert (found - wanted).abs().max() <= 2.0**-6 * wanted.abs().max(), name


@pytest.mark.gpu
@EACH
def test_casts_on_gpu_equal_casts_on_cpu(recipe) -> None:
    x = outliers(256, 384)
    for block in BLOCKS[recipe.name]:
        here, _ = quantize_blocks(x, block, E4M3, recipe)
        there, _ = quantize_blocks(x.cuda(), block, E4M3, recipe)
        assert np.array_equal(raw(here.data), raw(there.data.cpu()))
        assert np.array_equal(raw(here.scale_inv), raw(there.scale_inv.cpu()))
