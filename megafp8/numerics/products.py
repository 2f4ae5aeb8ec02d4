"""Products of 16-bit tensors, in the dtype that the device multiplies fastest.

A CPU without BF16 units multiplies BF16 several times slower than FP32 (oneDNN emulates it;
docs/performance.md has a training step). There the operands are widened to FP32, which is exact,
multiplied with sums in FP32, and the product is rounded once: what BF16 units do, too. Which path a
CPU takes follows from its flags alone, never from a measurement, so that all ranks and every resume
take the same on CPUs of one kind. GPUs keep their dtype.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Limits of ONEDNN_MAX_CPU_ISA that leave no BF16 units, of all that oneDNN knows.
_ISA_WITHOUT_BF16 = "SSE41 AVX AVX2 AVX2_VNNI AVX2_VNNI_2 AVX512_CORE AVX512_CORE_VNNI".split()
_UNITS = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")  # as torch.cpu.get_capabilities names them


@dataclass(frozen=True)
class Bf16Products:
    """How a CPU multiplies BF16.

    Attributes:
        chosen: "bf16" by units of its own, or "fp32" with one rounding to BF16.
        reason: in words.
    """

    chosen: str
    reason: str

    def record(self) -> dict[str, Any]:
        """Return plain values for the manifest."""
        return asdict(self)


@cache
def cpu_products() -> Bf16Products:
    """Say how this machine's CPU multiplies BF16, and why."""
    flags = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    return choose_products(flags, limit, torch.backends.mkldnn.is_available())


def choose_products(flags: set[str], limit: str, onednn: bool) -> Bf16Products:
    """Choose for a described CPU.

    Args:
        flags: instruction sets, as `torch.cpu.get_capabilities` names them.
        limit: ONEDNN_MAX_CPU_ISA, empty if it is not set.
        onednn: whether torch has oneDNN, through which it reaches the units.
    """
    units = [name for name in _UNITS if name in flags]
    if not units:
        return Bf16Products("fp32", f"the CPU has none of {', '.join(_UNITS)}")
    if not onednn:
        return Bf16Products("fp32", f"{units[0]} is there, but this torch was built without oneDNN")
    if limit.upper() in _ISA_WITHOUT_BF16:
        return Bf16Products("fp32", f"ONEDNN_MAX_CPU_ISA={limit} switches {units[0]} off")
    return Bf16Products("bf16", f"the CPU has {', '.join(units)}")


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which values of `dtype` are multiplied fastest: itself, or fp32."""
    if dtype == torch.bfloat16 and device.type == "cpu" and cpu_products().chosen == "fp32":
        return torch.float32
    return dtype


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a [..., k] @ b [k, n] in their dtype, rounded once; outside of autograd."""
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    dtype = product_dtype(a.dtype, a.device)
    return a @ b if dtype == a.dtype else (a.to(dtype) @ b.to(dtype)).to(a.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., k] @ weight [n, k]^T + bias [n], rounded once; differentiable."""
    if product_dtype(x.dtype, x.device) == x.dtype:
        return F.linear(x, weight, bias)
    return _WideLinear.apply(x, weight, bias)


class _WideLinear(torch.autograd.Function):
    """Keeps the 16-bit operands for the backward pass, not their widened copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The 16-bit operands: their fp32 copies would be twice the memory of a BF16 run.
        ctx.save_for_backward(x, weight)
        # The bias is added before the one rounding, as a fused epilogue does it.
        y = x.float() @ weight.t().float()
        return (y if bias is None else y.add_(bias)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        # [..., n] @ [n, k]
        dx = matmul(grad, weight) if ctx.needs_input_grad[0] else None
        dy, x2 = grad.flatten(0, -2), x.flatten(0, -2)  # [m, n], [m, k]
        dw = matmul(dy.t(), x2) if ctx.needs_input_grad[1] else None
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None
