"""Products of BF16 tensors on CPUs with and without BF16 units: one rounding of the exact sum."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megafp8.numerics import linear, matmul, product_dtype
from megafp8.numerics.products import choose_products
from tests.support.limits import PATIENCE_S

AMX = {"avx2", "avx512_f", "avx512_bf16", "amx_bf16"}


@pytest.mark.parametrize(
    ("flags", "limit", "onednn", "chosen", "reason"),
    [
        (AMX, "", True, "bf16", "the CPU has amx_bf16, avx512_bf16"),
        (AMX, "ALL", True, "bf16", "the CPU has amx_bf16"),
        (AMX, "avx512_core_bf16", True, "bf16", "the CPU has amx_bf16"),
        (AMX, "AVX512_CORE", True, "fp32", "ONEDNN_MAX_CPU_ISA=AVX512_CORE switches amx_bf16 off"),
        (AMX, "avx2", True, "fp32", "ONEDNN_MAX_CPU_ISA=avx2 switches amx_bf16 off"),
        (AMX, "", False, "fp32", "without oneDNN"),
        ({"avx2", "avx512_f"}, "", True, "fp32", "the CPU has none of amx_bf16, avx512_bf16"),
        ({"neon", "bf16"}, "", True, "bf16", "the CPU has bf16"),
    ],
)
def test_the_path_follows_from_flags_and_limit(
    flags: set[str], limit: str, onednn: bool, chosen: str, reason: str
) -> None:
    products = choose_products(flags, limit, onednn)
    assert products.chosen == chosen and reason in products.reason


def test_a_limit_in_the_environment_is_heard() -> None:
    """In a process of its own: oneDNN reads it once, and so does this project."""
    code = "from megafp8.numerics import cpu_products; print(cpu_products().chosen)"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.stdout == "fp32\n", ended.stderr


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Within half an ulp of BF16, but for what sums in FP32 and cancellation add."""
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    wanted = exact.abs().numpy()
    ulp = np.exp2(np.floor(np.log2(wanted.clip(1e-30))) - 7)
    error = (found.double() - exact).abs().numpy()
    assert (error <= ulp / 2 + wanted.max() * 2.0**-18).all()


def test_a_product_is_rounded_once(each_cpu: str) -> None:
    assert product_dtype(torch.bfloat16, torch.device("cpu")) == getattr(
        torch, {"bf16": "bfloat16", "fp32": "float32"}[each_cpu]
    )
    assert product_dtype(torch.float16, torch.device("cpu")) == torch.float16
    a, b = torch.randn(48, 96).bfloat16(), torch.randn(80, 96).bfloat16()
    assert_rounded_once(matmul(a, b.t()), a.double() @ b.double().t())
    assert_rounded_once(matmul(a.t(), a), a.double().t() @ a.double())


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_gives_the_gradients_of_torchs(each_cpu: str, bias: bool) -> None:
    x = torch.randn(3, 16, 64).bfloat16().requires_grad_()
    w = torch.randn(32, 64).bfloat16().requires_grad_()
    b = torch.randn(32).bfloat16().requires_grad_() if bias else None
    dy = torch.randn(3, 16, 32).bfloat16()
    inputs = [t for t in (x, w, b) if t is not None]
    y = linear(x, w, b)
    found = torch.autograd.grad(y, inputs, dy)
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(F.linear(*exact), exact, dy.double())
    for mine, theirs in zip(found, wanted, strict=True):
        assert_rounded_once(mine, theirs)
    assert_rounded_once(y.detach(), F.linear(*exact).detach())


def test_a_linear_keeps_its_operands_in_16_bits(each_cpu: str) -> None:
    kept = []
    x, w = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
        linear(x.requires_grad_(), w)
    assert len(kept) == 2 and {t.dtype for t in kept} == {torch.bfloat16}
