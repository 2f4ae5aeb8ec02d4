"""A GPU that cannot multiply a recipe is told so before step 1, unless emulation is asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.config import ModelShape
from megafp8.config.recipes import RECIPES
from megafp8.errors import PrecisionError
from megafp8.numerics import Recipe, missing_product, probe
from megafp8.precision import PrecisionPlan, build_plan, recipe_from_config
from megafp8.train import pretrain
from megafp8.train.pretrain import _check_fp8_device, _try_products
from tests.model.small import FP8, VOCAB, small_config
from tests.numerics.test_numerics_device_gemm import Pretend, pretend  # noqa: F401

CUDA: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cuda", 0)))
CPU: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")))


@pytest.mark.parametrize(
    ("recipe", "fmt", "capability", "cuda", "reason"),
    [
        ("delayed", "hybrid", (8, 0), "13.0", "8.0; FP8 matrix units need 8.9"),
        ("tensorwise", "hybrid", (7, 5), "12.8", "7.5; FP8 matrix units need 8.9"),
        ("rowwise", "e4m3", (12, 0), "13.0", "12.0; GEMMs with a scale a row are there for 8.9"),
        ("blockwise", "e4m3", (10, 0), "13.0", "10.0; GEMMs with 128x128 blocks need 9.0"),
        ("blockwise", "e4m3", (9, 0), "12.8", "torch was built for CUDA 12.8; GEMMs with 128x128"),
        ("blockwise", "hybrid", (9, 0), "13.0", "take E4M3 on both sides, not E5M2"),
        ("mxfp8", "e4m3", (9, 0), "13.0", "9.0; MXFP8 matrix units need 10.x"),
        ("mxfp8", "hybrid", (10, 0), "13.0", "take E4M3 on both sides, not E5M2"),
    ],
)
def test_what_a_gpu_cannot_multiply_needs_emulation_by_name(
    pretend: Pretend,  # noqa: F811
    recipe: str,
    fmt: str,
    capability: tuple[int, int],
    cuda: str,
    reason: str,
) -> None:
    pretend(capability, cuda)
    flags: dict[str, Any] = {**FP8, "fp8_recipe": recipe, "fp8_format": fmt}
    if recipe != "delayed":
        flags.pop("fp8_amax_history_len")

    def check(mesh: Any, **more: bool) -> None:
        config = small_config(**flags, **more)
        found = recipe_from_config(config)
        assert found is not None
        _check_fp8_device(config, found, mesh)

    with pytest.raises(PrecisionError) as error:
        check(CUDA)
    text = str(error.value)
    assert text.startswith(f"--fp8-format {fmt} --fp8-recipe {recipe}: ") and reason in text
    assert "give --fp8-emulate" in text and "\n" not in text
    check(CUDA, fp8_emulate=True)
    check(CUDA, fp8_fake_quant=True)
    check(CPU)


def test_what_a_gpu_multiplies_is_taken(pretend: Pretend) -> None:  # noqa: F811
    pretend((9, 0), "13.0")
    for recipe, fmt in (("rowwise", "hybrid"), ("blockwise", "e4m3"), ("tensorwise", "e4m3")):
        config = small_config(bf16=True, fp8_format=fmt, fp8_recipe=recipe)
        found = recipe_from_config(config)
        assert found is not None
        _check_fp8_device(config, found, CUDA)


def plan_of(recipe: str) -> tuple[PrecisionPlan, Recipe]:
    sizes: dict[str, Any] = {"hidden_size": 128, "ffn_hidden_size": 256, "seq_length": 64}
    config = small_config(bf16=True, fp8_format="e4m3", fp8_recipe=recipe, **sizes)
    found = recipe_from_config(config)
    assert found is not None
    plan = build_plan(config, ModelShape.from_config(config, VOCAB), config.layout(1))
    return plan, found


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_that_have_kernels_pass(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    plan, found = plan_of(recipe)
    calls: list[tuple[Any, ...]] = []

    def counted(*arguments: Any) -> str | None:
        calls.append(arguments[2])
        return missing_product(*arguments)

    monkeypatch.setattr(pretrain, "missing_product", counted)
    _try_products(plan, found, torch.device("cpu"))
    fp8 = {(p.tokens, p.in_features, p.out_features) for p in plan.linears if p.precision == "fp8"}
    assert fp8 and set(calls) == fp8 and len(calls) == len(fp8), "each size once"


@pytest.mark.parametrize("product", ["fprop", "dgrad", "wgrad"])
def test_a_size_without_a_kernel_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, product: str
) -> None:
    plan, found = plan_of("rowwise")
    original = getattr(probe, product)

    def limited(a: Any, b: Any, *dtype: Any) -> Any:
        if 256 in (*a.data.shape, *b.data.shape):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling it")
        return original(a, b, *dtype)

    monkeypatch.setattr(probe, product, limited)
    with pytest.raises(PrecisionError) as error:
        _try_products(plan, found, torch.device("cpu"))
    text = str(error.value)
    assert "\n" not in text and f"({product}: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when" in text
    assert text.startswith("--fp8-recipe rowwise: decoder.layers.") and "--precision-policy" in text


def test_only_a_gpu_is_tried(monkeypatch: pytest.MonkeyPatch, pretend: Pretend) -> None:  # noqa: F811
    tried: list[str] = []
    monkeypatch.setattr(
        pretrain, "_try_products", lambda plan, recipe, device: tried.append(recipe.name)
    )
    pretend((9, 0), "13.0")
    for recipe in ("rowwise", "mxfp8"):  # emulated, the second
        for device in ("cpu", "cuda"):
            pretrain._check_fp8_kernels(*plan_of(recipe), torch.device(device))
    assert tried == ["rowwise"]
