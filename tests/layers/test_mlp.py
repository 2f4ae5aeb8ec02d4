"""The feed-forward part: SwiGLU's own gradient, and each activation against plain torch."""

import pytest
import torch
import torch.nn.functional as F

from megafp8.layers.mlp import Mlp, _SwigluFunction
from megafp8.layers.native import NativeBackend
from tests.model.small import GPT2, LLAMA, layer_context, randomize, small_config

pytestmark = pytest.mark.usefixtures("one_rank")
PREFIX = "decoder.layers.0.mlp"


def test_swiglu_gradient():
    x = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(_SwigluFunction.apply, (x,))
    gate, up = x.detach()[..., :5], x.detach()[..., 5:]
    assert torch.allclose(_SwigluFunction.apply(x), gate / (1 + (-gate).exp()) * up)


def test_swiglu_keeps_one_tensor():
    """gate and up are kept once, as one tensor, and no activation beside them."""
    saved: list[tuple[int, ...]] = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _SwigluFunction.apply(torch.randn(4, 2, 10, requires_grad=True))
    assert saved == [(4, 2, 10)]


@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh", "swiglu"])
def test_mlp_matches_plain_torch(activation):
    swiglu = activation == "swiglu"
    style = LLAMA if swiglu else {**GPT2, "activation": activation}
    context = layer_context(small_config(style, add_mlp_bias=True))
    mlp = Mlp(context, NativeBackend(), PREFIX, (False, False), True, swiglu, activation)
    randomize(dict(mlp.named_parameters()))
    x = torch.randn(16, 2, 32)
    w1, b1, w2, b2 = (p.data.to_local() for p in mlp.parameters())
    if swiglu:
        assert w1.shape == (2, 64, 32) and b1.shape == (2, 64)
        hidden = F.silu(x @ w1[0].t() + b1[0]) * (x @ w1[1].t() + b1[1])
    else:
        hidden = x @ w1.t() + b1
        if activation == "gelu":
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
        else:
            inner = (2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)
            hidden = 0.5 * hidden * (1 + torch.tanh(inner))
    assert torch.allclose(mlp(x), hidden @ w2.t() + b2, rtol=1e-5, atol=1e-5)
