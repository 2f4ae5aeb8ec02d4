"""The attention core in plain torch: `scaled_dot_product_attention`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megafp8.layers.backend import CoreOptions
from megafp8.layers.dropout import MicroBatchKey
from megafp8.numerics import product_dtype
from megafp8.parallel.rng import default_generator_seeded


class SdpaCore(nn.Module):
    """Causal attention by SDPA; see `Backend.attention_core` for the shapes."""

    def __init__(self, options: CoreOptions) -> None:
        super().__init__()
        self.options = options
        self.queries_per_group = options.num_heads // options.num_groups

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key: MicroBatchKey) -> Tensor:
        """Attend; dropout on the weights follows the key and is off outside training."""
        s, b = q.shape[:2]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))  # [b, heads, s, d]
        # On a GPU the kernels share K and V; on CPU copies are faster than SDPA's own expansion.
        grouped = self.queries_per_group > 1 and q.device.type != "cpu"
        if self.queries_per_group > 1 and not grouped:
            k = k.repeat_interleave(self.queries_per_group, dim=1)
            v = v.repeat_interleave(self.queries_per_group, dim=1)
        mask = None
        if self.options.window_left is not None:
            mask = window_mask(s, self.options.window_left, q.device)
        p = self.options.dropout if key.training else 0.0
        dtype, wide = q.dtype, attention_dtype(q)
        if wide != dtype and p == 0.0:
            core = _WideAttention.apply(q, k, v, mask)
            return core.permute(2, 0, 1, 3).reshape(s, b, -1)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
        if p == 0.0:
            core = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )
        else:
            with default_generator_seeded(key.local(dropout_site(self.options)), q.device):
                core = F.scaled_dot_product_attention(
                    q, k, v, mask, p, is_causal=mask is None, enable_gqa=grouped
                )
        # [b, heads, s, d] -> [s, b, heads * d]
        return core.permute(2, 0, 1, 3).reshape(s, b, -1).to(dtype)


def attention_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which a core multiplies q [b, heads, s, d] fastest.

    On CPUs with BF16 units torch 2.13 pays more for packing narrow heads than the units gain: with
    AMX, BF16 takes eight times as long as FP32 at d = 16, 1.7 times at 32, as long at 64, and half
    as long at 128.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[-1] < 64:
        return torch.float32
    return product_dtype(q.dtype, q.device)


class _WideAttention(torch.autograd.Function):
    """SDPA of 16-bit q, k, v [b, heads, s, d] in FP32; keeps them and its result in 16 bits."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        core, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.float(), k.float(), v.float(), 0.0, mask is None, attn_mask=_added(mask)
        )
        core = core.to(q.dtype)
        ctx.save_for_backward(q, k, v, core, log_sum, mask)
        return core

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, core, log_sum, mask = ctx.saved_tensors
        wide = (t.float() for t in (grad, q, k, v, core))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, log_sum, 0.0, mask is None, attn_mask=_added(mask)
        )
        return (*(g.to(q.dtype) for g in grads), None)


def _added(mask: Tensor | None) -> Tensor | None:
    """What is added to the logits: 0 where the bool mask is True, -inf elsewhere."""
    return None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def dropout_site(options: CoreOptions) -> str:
    """Name of the random stream of a core's dropout."""
    return f"{options.name.removesuffix('.core_attention')}.core"


def window_mask(length: int, left: int, device: torch.device) -> Tensor:
    """Mask [s, s], bool, True where query i may see key j: i - left <= j <= i."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions
    return (distance >= 0) & (distance <= left)
