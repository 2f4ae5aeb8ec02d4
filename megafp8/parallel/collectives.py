"""Collectives over one process group, counted, and their autograd conjugates.

A group of one rank makes every collective a plain no-op, so one code path serves any layout.
Activations are [s, b, h]; with sequence parallelism s is split over the tensor-parallel ranks.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.numerics import Fp8Format, encode_rows, sum_rows
from megafp8.parallel.traffic import Traffic

# torch 2.13 renamed these two and warns about the old names; 2.11 knows only the old ones.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


class Pending(Protocol):
    """Work under way, whose result is there after `wait`."""

    def wait(self) -> Any:
        """Finish it, in this thread's order of work on the device."""
        ...


class _PendingSum:
    """An FP8 all-to-all under way: `wait` sums what has arrived into `shard`."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], None]) -> None:
        self.work, self.finish = work, finish

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.finish()


class CommGroup:
    """A process group with its size, this rank's place in it and the counter of its traffic.

    Args:
        process_group: the group, or None for a group of this rank alone.
        traffic: where bytes are counted.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self.process_group = process_group
        self.traffic = traffic
        self.size = process_group.size() if process_group is not None else 1
        self.rank = process_group.rank() if process_group is not None else 0

    def all_reduce(
        self, tensor: Tensor, kind: str, op: Any = dist.ReduceOp.SUM, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce `tensor` in place over the group."""
        if self.size == 1:
            return None
        # Counted before the call: an asynchronous one returns at once.
        self.traffic.reduced(kind, tensor, self.size)
        return dist.all_reduce(tensor, op=op, group=self.process_group, async_op=async_op)

    def all_gather(self, tensor: Tensor, kind: str) -> Tensor:
        """[n, ...] on each rank -> [size * n, ...], in rank order. FP8 travels as uint8 bytes."""
        if self.size == 1:
            return tensor
        dtype = tensor.dtype
        if dtype in FLOAT8:  # gloo has no float8
            tensor = tensor.view(torch.uint8)
        tensor = tensor.contiguous()
        # [n, ...] -> [size * n, ...]: ranks are blocks of dim 0, which for activations is s.
        full = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        all_gather_single(full, tensor, group=self.process_group)
        self.traffic.gathered(kind, full, self.size)
        return full.view(dtype)

    def reduce_scatter(
        self, tensor: Tensor, kind: str, async_op: bool = False
    ) -> tuple[Tensor, Pending | None]:
        """[size * n, ...] summed over ranks -> this rank's [n, ...], and the work if async."""
        if self.size == 1:
            return tensor, None
        tensor = tensor.contiguous()
        shard = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        work = reduce_scatter_single(shard, tensor, group=self.process_group, async_op=async_op)
        self.traffic.gathered(kind, tensor, self.size)
        return shard, work

    def reduce_scatter_fp8(
        self, tensor: Tensor, kind: str, fmt: Fp8Format, async_op: bool = False
    ) -> tuple[Tensor, Pending | None]:
        """As `reduce_scatter`, with FP8 bytes on the wire and the sum in fp32 in rank order.

        One all-to-all of codes and their scales (`numerics.payload`). This rank's own part does not
        travel and is added uncast. Until the pending work is waited for, the shard is not filled.
        """
        if self.size == 1:
            return tensor, None
        shard = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        # [size * n, ...] -> [size, n * ...]: row r is what rank r will hold the sum of.
        rows = tensor.reshape(self.size, -1)
        payload = encode_rows(rows, fmt)
        received = torch.empty_like(payload)
        work = dist.all_to_all_single(
            received, payload, group=self.process_group, async_op=async_op
        )
        self.traffic.gathered(kind, payload, self.size)

        def finish() -> None:
            total = sum_rows(received, rows[self.rank], self.rank, fmt)  # fp32 [n * ...]
            # Rounded to the dtype of the activations once, after the sum.
            shard.copy_(total.view(shard.shape))

        if not async_op:
            finish()
            return shard, None
        return shard, _PendingSum(work, finish)


class _CopyToGroup(torch.autograd.Function):
    """Identity in forward, all-reduce in backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, kind: str) -> Tensor:
        ctx.group, ctx.kind = group, kind
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # The all-reduce works in place, and autograd may hand the same gradient to others.
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(grad, ctx.kind)
        return grad, None, None


class _ReduceFromGroup(torch.autograd.Function):
    """All-reduce in forward, identity in backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, kind: str) -> Tensor:
        # In place on a copy: the partial sums may be saved for somebody's backward.
        total = x.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total, kind)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _GatherSequence(torch.autograd.Function):
    """All-gather along s in forward, reduce-scatter along s in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, kinds: tuple[str, str]) -> Tensor:
        ctx.group, ctx.kinds = group, kinds
        return group.all_gather(x, kinds[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.reduce_scatter(grad, ctx.kinds[1])[0], None, None


class _ScatterSequence(torch.autograd.Function):
    """Reduce-scatter along s in forward, all-gather along s in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, kinds: tuple[str, str]) -> Tensor:
        ctx.group, ctx.kinds = group, kinds
        return group.reduce_scatter(x, kinds[1])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather(grad, ctx.kinds[0]), None, None


LINEAR_KINDS = ("tp_linear_all_gather", "tp_linear_reduce_scatter")
OTHER_KINDS = ("tp_other_all_gather", "tp_other_reduce_scatter")


def copy_to_group(x: Tensor, group: CommGroup, kind: str = "tp_all_reduce") -> Tensor:
    """Replicated x enters a tensor-parallel region; its gradient is the sum over ranks."""
    return x if group.size == 1 else _CopyToGroup.apply(x, group, kind)


def reduce_from_group(x: Tensor, group: CommGroup, kind: str = "tp_all_reduce") -> Tensor:
    """Partial sums x leave a tensor-parallel region as their total on every rank."""
    return x if group.size == 1 else _ReduceFromGroup.apply(x, group, kind)


def gather_sequence(x: Tensor, group: CommGroup, kinds: tuple[str, str] = OTHER_KINDS) -> Tensor:
    """[s/tp, b, h] -> [s, b, h]; the gradient is reduce-scattered."""
    return x if group.size == 1 else _GatherSequence.apply(x, group, kinds)


def scatter_sequence(x: Tensor, group: CommGroup, kinds: tuple[str, str] = OTHER_KINDS) -> Tensor:
    """Partial sums [s, b, h] -> this rank's [s/tp, b, h] of the total; the gradient is gathered."""
    return x if group.size == 1 else _ScatterSequence.apply(x, group, kinds)
