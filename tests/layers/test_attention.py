"""Self-attention against an explicit softmax over an explicit mask, in fp32."""

import math

import pytest
import torch
from torch import Tensor

from megafp8.layers.attention import AttentionOptions, SelfAttention
from megafp8.layers.backend import CoreOptions
from megafp8.layers.dropout import MicroBatchKey
from megafp8.layers.native import NativeBackend
from megafp8.layers.native.attention_core import SdpaCore, window_mask
from megafp8.layers.rope import Rope
from tests.model.small import layer_context, randomize, small_config

pytestmark = pytest.mark.usefixtures("one_rank")
SEQUENCE, HEADS, DIM = 24, 4, 8
KEY = MicroBatchKey(7, 0, False, True)


def make_attention(groups: int = 4, **changes) -> SelfAttention:
    config = small_config(
        seq_length=SEQUENCE,
        num_query_groups=groups,
        qk_layernorm=True,
        add_qkv_bias=True,
        add_attention_output_bias=True,
    )
    values = {
        "prefix": "decoder.layers.0.self_attention",
        "num_heads": HEADS,
        "num_groups": groups,
        "head_dim": DIM,
        "fp8": (False, False),
        "qkv_bias": True,
        "output_bias": True,
        "norm": None,
        "dropout": 0.0,
        "window_left": None,
        "recompute_core": False,
        "rope": None,
    }
    values |= changes
    rope = values.pop("rope")
    options = AttentionOptions(**values)
    attention = SelfAttention(layer_context(config), NativeBackend(), options, rope)
    randomize(dict(attention.named_parameters()))
    return attention


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rope_by_angle(x: Tensor) -> Tensor:
    """Rotate [s, b, d], channel i with i + d/2."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[0]), 10000.0 ** (-torch.arange(half) / half))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def reference(
    x: Tensor, weights: dict[str, Tensor], groups: int, norm: bool, window: int | None, rope: bool
) -> Tensor:
    """Head by head. Rows of the fused weight: per group its queries, then one key, one value."""
    s, b, _ = x.shape
    fused = x @ weights["linear_qkv.weight"].t() + weights["linear_qkv.bias"]
    parts = fused.split(DIM, -1)
    per_group = HEADS // groups
    outputs = []
    for head in range(HEADS):
        group, place = divmod(head, per_group)
        first = group * (per_group + 2)
        q, k, v = parts[first + place], parts[first + per_group], parts[first + per_group + 1]
        if norm:
            q, k = rms(q, weights["q_layernorm.weight"]), rms(k, weights["k_layernorm.weight"])
        if rope:
            q, k = rope_by_angle(q), rope_by_angle(k)
        scores = torch.einsum("ibd,jbd->bij", q, k) / math.sqrt(DIM)
        for i in range(s):
            for j in range(s):
                if j > i or (window is not None and i - j > window):
                    scores[:, i, j] = -math.inf
        outputs.append(torch.einsum("bij,jbd->ibd", scores.softmax(-1), v))
    return torch.cat(outputs, -1) @ weights["linear_proj.weight"].t() + weights["linear_proj.bias"]


@pytest.mark.parametrize(
    "groups, norm, window, rope",
    [
        (4, False, None, False),  # multi-head
        (2, False, None, True),  # grouped queries
        (1, False, None, True),  # multi-query
        (2, True, None, True),  # norms on queries and keys, before the rotation
        (4, False, 5, False),
        (2, True, 0, True),  # a window of the token itself
        (1, False, SEQUENCE, False),  # a window wider than the sequence
    ],
)
def test_attention_matches_softmax(groups, norm, window, rope):
    attention = make_attention(
        groups,
        norm=("RMSNorm", 1e-5) if norm else None,
        window_left=window,
        rope=Rope(DIM, SEQUENCE, 10000.0, None, torch.device("cpu")) if rope else None,
    )
    x = torch.randn(SEQUENCE, 2, 32, requires_grad=True)
    grad = torch.randn(SEQUENCE, 2, 32)
    y = attention(x, KEY)
    y.backward(grad)
    weights = {
        name: p.data.to_local().clone().requires_grad_(True)
        for name, p in attention.named_parameters()
    }
    assert ("q_layernorm.weight" in weights) == norm
    exact_x = x.detach().clone().requires_grad_(True)
    exact = reference(exact_x, weights, groups, norm, window, rope)
    exact.backward(grad)
    assert torch.allclose(y, exact, rtol=1e-4, atol=1e-5)
    assert torch.allclose(x.grad, exact_x.grad, rtol=1e-4, atol=1e-4)
    for name, parameter in attention.named_parameters():
        found, wanted = parameter.grad.to_local(), weights[name].grad
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max() + 1e-5), name


def test_window_mask_by_hand():
    wanted = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert window_mask(4, 1, torch.device("cpu")).int().tolist() == wanted


def test_future_tokens_change_nothing():
    attention = make_attention(2)
    x = torch.randn(SEQUENCE, 1, 32)
    y = attention(x, KEY)
    x[10:] = 99.0
    assert torch.equal(attention(x, KEY)[:10], y[:10])


def attention_mask(attention: SelfAttention, key: MicroBatchKey, length: int, heads: int) -> Tensor:
    """The dropout mask of the core, read off: equal scores and values that are the identity."""
    zeros = torch.zeros(length, 2, heads, DIM)
    values = torch.eye(length)[:, None, None].expand(length, 2, heads, length)
    weights = attention.core_attention(zeros, zeros, values, key)
    return weights.view(length, 2, heads, length).permute(1, 2, 0, 3) != 0


def test_dropout_mask_by_key():
    attention = make_attention(4, dropout=0.5)
    length = 64
    seen = torch.ones(length, length, dtype=torch.bool).tril()

    def mask(*key) -> Tensor:
        found = attention_mask(attention, MicroBatchKey(*key), length, HEADS)
        assert not found[..., ~seen].any()
        return found[..., seen]

    first = mask(7, 0, False, True)  # 2 * 4 * 2080 = 16 640 weights
    assert abs(first.float().mean() - 0.5) < 0.02
    assert torch.equal(first, mask(7, 0, False, True))
    for other in ((8, 0, False, True), (7, 1, False, True)):  # another micro-batch, another rank
        assert abs((mask(*other) == first).float().mean() - 0.5) < 0.03
    assert mask(7, 0, False, False).all(), "dropout outside training"


def test_dropout_leaves_the_default_generator_alone():
    attention = make_attention(4, dropout=0.5)
    before = torch.get_rng_state()
    attention(torch.randn(SEQUENCE, 1, 32), KEY)
    torch.set_rng_state(before)
    torch.randn(SEQUENCE, 1, 32)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    attention(torch.randn(SEQUENCE, 1, 32), KEY)
    assert torch.equal(torch.get_rng_state(), after)


def test_recomputed_core_is_bit_equal():
    results = []
    for recompute in (False, True):
        attention = make_attention(2, dropout=0.3, recompute_core=recompute)
        torch.manual_seed(1)
        x = torch.randn(SEQUENCE, 2, 32, requires_grad=True)
        y = attention(x, KEY)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad.to_local() for p in attention.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("dim", [8, 64])
@pytest.mark.parametrize(("dropout", "window"), [(0.0, None), (0.5, None), (0.0, 5)])
def test_a_core_in_bf16_is_near_the_exact_one(
    each_cpu: str, dim: int, dropout: float, window: int | None
) -> None:
    """Whatever it multiplies in; the result and the gradients are BF16."""
    core = SdpaCore(
        CoreOptions("decoder.layers.0.self_attention.core_attention", 2, 1, dim, dropout, window)
    )
    shapes = [(SEQUENCE, 3, heads, dim) for heads in (2, 1, 1)]
    given = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    exact = [t.detach().float().requires_grad_() for t in given]
    key = MicroBatchKey(7, 0, dropout > 0, True)
    found, wanted = core(*given, key), core(*exact, key)
    dy = torch.randn(found.shape).bfloat16()
    found.backward(dy)
    wanted.backward(dy.float())
    pairs = [(found, wanted), *((t.grad, e.grad) for t, e in zip(given, exact, strict=True))]
    for mine, theirs in pairs:
        assert mine is not None and theirs is not None and mine.dtype == torch.bfloat16
        assert (mine.float() - theirs).norm() <= 2.0**-7 * theirs.norm()
