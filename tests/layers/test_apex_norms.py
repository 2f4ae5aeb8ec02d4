"""`--norm-impl apex` on a stand-in with the functions of NVIDIA's, and on NVIDIA's on a GPU."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.config.cli import load_config
from megafp8.errors import ConfigurationError
from megafp8.layers import apex
from megafp8.layers.choice import choose_backend
from megafp8.layers.native import NativeBackend
from megafp8.layers.native import norm as native_norm
from megafp8.layers.native.norm import Norm
from tests.model.small import GPT2, LLAMA, layer_context, small_config
from tests.support.layouts import PARITY

NAME = "decoder.layers.0.input_layernorm"
CALLS: list[str] = []


# Parameters as in NVIDIA/apex (apex/normalization/fused_layer_norm.py).
def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    assert input.dtype == weight.dtype == bias.dtype and not memory_efficient
    CALLS.append("layer")
    return F.layer_norm(input.float(), normalized_shape, weight.float(), bias.float(), eps).to(
        input.dtype
    )


def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Any,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    assert input.dtype == weight.dtype and not memory_efficient
    CALLS.append("rms")
    return F.rms_norm(input.float(), normalized_shape, weight.float(), eps).to(input.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = ModuleType("apex.normalization.fused_layer_norm")
    functions.fused_layer_norm_affine = fused_layer_norm_affine  # type: ignore[attr-defined]
    functions.fused_rms_norm_affine = fused_rms_norm_affine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "apex.normalization", ModuleType("apex.normalization"))
    monkeypatch.setitem(sys.modules, functions.__name__, functions)
    monkeypatch.delitem(sys.modules, "megafp8.layers.apex.norm", raising=False)
    CALLS.clear()


def plain(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def results(norm: Any, x: Tensor, device: str = "cpu") -> list[Tensor]:
    norm = norm.to(device, x.dtype)
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            noise = torch.linspace(-0.3, 0.3, parameter.shape[0]) + number
            plain(parameter).add_(noise.to(device))
    x = x.detach().requires_grad_(True)
    y = norm(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y).to(y.dtype))
    assert x.grad is not None
    return [y.detach(), x.grad, *(plain(p.grad) for p in norm.parameters())]


@pytest.mark.parametrize("style", [LLAMA, GPT2], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apex_norms_are_the_native_ones(
    one_rank: None, stand_in: None, style: dict[str, Any], dtype: torch.dtype
) -> None:
    config = small_config(style)
    kind, epsilon = config.model.normalization, config.model.norm_epsilon
    x = torch.randn(16, 2, 32).to(dtype)
    both = []
    for impl in ("native", "apex"):
        context = layer_context(config, norm_impl=impl)
        norm = NativeBackend().norm(context, NAME, kind, epsilon)
        assert isinstance(norm, Norm) and ("apex" in repr(norm)) == (impl == "apex")
        assert [name for name, _ in norm.named_parameters()] == (
            ["weight"] if kind == "RMSNorm" else ["weight", "bias"]
        )
        both.append(results(norm, x))
    assert CALLS == ["rms" if kind == "RMSNorm" else "layer"]
    for native, fused in zip(*both, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(fused, native, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "apex is not installed; NVIDIA's is built from"),
        (("apex/__init__.py", "apex/lib.py"), "the installed package apex is PyPI's, which has"),
        (
            ("apex/__init__.py", "apex/normalization/__init__.py"),
            "without its CUDA extensions (fused_layer_norm_cuda)",
        ),
        (
            (
                "apex/__init__.py",
                "apex/normalization/__init__.py",
                "fused_layer_norm_cuda.py",
            ),
            "apex's norms need a CUDA device",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: tuple[str, ...], said: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(apex.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="^--norm-impl apex: ") as caught:
        choose_backend(load_config([*PARITY, "--norm-impl", "apex"]))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("style", [LLAMA, GPT2], ids=["RMSNorm", "LayerNorm"])
def test_kernels_against_native(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, style: dict[str, Any]
) -> None:
    usable, reason = apex.norms_available()
    if not usable:
        pytest.skip(reason)
    from megafp8.layers.apex import norm as apex_norm

    # Plain parameters: a DTensor needs a mesh of CUDA devices.
    for module in (native_norm, apex_norm):
        monkeypatch.setattr(module, "local", lambda tensor: tensor)
    config = small_config(style)
    kind, epsilon = config.model.normalization, config.model.norm_epsilon
    x = torch.randn(256, 2, 32, device="cuda").bfloat16()
    both = []
    for impl in ("native", "apex"):
        norm = NativeBackend().norm(layer_context(config, norm_impl=impl), NAME, kind, epsilon)
        for name, parameter in list(norm.named_parameters()):
            setattr(norm, name, torch.nn.Parameter(plain(parameter.detach())))
        both.append(results(norm, x, "cuda"))
    for native, fused in zip(*both, strict=True):
        torch.testing.assert_close(fused, native, rtol=0.02, atol=0.02)
