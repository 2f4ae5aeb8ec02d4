"""RMSNorm and LayerNorm, forward and backward, against autograd in fp64."""

import pytest
import torch
from torch import Tensor

from megafp8.layers.native.norm import Norm
from tests.model.small import GPT2, LLAMA, layer_context, small_config

pytestmark = pytest.mark.usefixtures("one_rank")
EPSILON = 1e-5


def make_norm(kind: str) -> Norm:
    context = layer_context(small_config(LLAMA if kind == "RMSNorm" else GPT2))
    norm = Norm(context, "decoder.layers.0.input_layernorm", kind, EPSILON)
    for parameter in norm.parameters():
        parameter.data.to_local().normal_(1.0, 0.3)
    return norm


def reference(x: Tensor, kind: str, weight: Tensor, bias: Tensor | None) -> Tensor:
    if kind == "LayerNorm":
        assert bias is not None
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + EPSILON).sqrt() * weight + bias
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_matches_fp64(kind, dtype, tolerance):
    norm = make_norm(kind).to(dtype)
    # Rows of very different size: an epsilon in the wrong place shows in the small ones.
    x = (torch.randn(6, 3, 32) * torch.tensor([1e-3, 1.0, 30.0])[:, None]).to(dtype)
    x.requires_grad_(True)
    kept = x.detach().clone()
    grad = torch.randn(6, 3, 32).to(dtype)
    y = norm(x)
    y.backward(grad)
    assert y.dtype == dtype and x.grad is not None
    assert torch.equal(x.detach(), kept), "the input was written to"

    exact_x = kept.double().requires_grad_(True)
    parameters = [p.data.to_local().double().requires_grad_(True) for p in norm.parameters()]
    exact = reference(exact_x, kind, parameters[0], parameters[1] if len(parameters) > 1 else None)
    exact.backward(grad.double())
    pairs = [(y, exact), (x.grad, exact_x.grad)]
    pairs += [
        (p.grad.to_local(), e.grad) for p, e in zip(norm.parameters(), parameters, strict=True)
    ]
    assert len(parameters) == (2 if kind == "LayerNorm" else 1)
    for found, wanted in pairs:
        size = wanted.abs().amax(-1, keepdim=True)
        assert ((found.double() - wanted).abs() / size).max() < tolerance


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_parameter_gradients_are_summed_in_fp32(kind):
    """A bf16 sum of thousands of ones would stop at 256."""
    norm = make_norm(kind).to(torch.bfloat16)
    x = torch.ones(4096, 32)
    x[:, 16:] = -1.0  # mean 0, so both norms leave +-1
    y = norm(x.bfloat16())
    y.backward(torch.ones_like(y))
    weight = norm.weight.grad.to_local()
    assert weight[:16].eq(4096).all() and weight[16:].eq(-4096).all()
    if norm.bias is not None:
        assert norm.bias.grad.to_local().eq(4096).all()


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_zero_and_constant_rows_stay_finite(kind):
    norm = make_norm(kind)
    x = torch.stack([torch.zeros(32), torch.full((32,), 7.0)]).requires_grad_(True)
    y = norm(x)
    y.sum().backward()
    assert x.grad is not None and y.isfinite().all() and x.grad.isfinite().all()
