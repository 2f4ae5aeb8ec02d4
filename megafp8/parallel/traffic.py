"""Counts the bytes a rank hands to `torch.distributed`, by kind and dtype.

Bytes are what a rank sends by the direct algorithm: (n-1)/n of the full tensor for gather and
scatter, twice that for all-reduce, the whole tensor on the sender alone for point to point.
The caller passes the tensor that really travels, never a formula for it.
"""

from collections import defaultdict

import torch
from torch import Tensor

KINDS = (
    "tp_linear_all_gather",
    "tp_linear_reduce_scatter",
    "tp_other_all_gather",
    "tp_other_reduce_scatter",
    "tp_all_reduce",
    "pp_p2p",
    "fsdp_block_all_gather",
    "fsdp_block_reduce_scatter",
    "fsdp_other_all_gather",
    "fsdp_other_reduce_scatter",
    "dp_all_reduce",
    "amax_all_reduce",
    "tied_embedding",
    "grad_norm",
    "loss",
)
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.float64,
    torch.int64,
    torch.int32,
)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class Traffic:
    """Per-rank counters since the last `drain`.

    Counting is plain integer arithmetic on sizes, so it costs no device sync.
    """

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, torch.dtype], int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)

    def _add(self, kind: str, dtype: torch.dtype, sent: int) -> None:
        assert kind in KINDS, kind
        self._bytes[kind, dtype] += sent
        self._calls[kind] += 1

    def gathered(self, kind: str, full: Tensor, size: int) -> None:
        """One all-gather or reduce-scatter whose full (unsharded) tensor is `full`."""
        self._add(kind, full.dtype, full.numel() * full.element_size() * (size - 1) // size)

    def reduced(self, kind: str, tensor: Tensor, size: int) -> None:
        """One all-reduce of `tensor` over `size` ranks."""
        # A ring all-reduce is a reduce-scatter and an all-gather, (n - 1)/n of the tensor each.
        sent = 2 * tensor.numel() * tensor.element_size() * (size - 1) // size
        self._add(kind, tensor.dtype, sent)

    def sent(self, kind: str, tensor: Tensor) -> None:
        """One point-to-point send of `tensor`."""
        self._add(kind, tensor.dtype, tensor.numel() * tensor.element_size())

    def drain(self) -> list[int]:
        """Counters since the last call as one flat list of integers, and start again.

        Layout: bytes [len(KINDS) * len(DTYPES)] in row-major order, then calls [len(KINDS)].
        """
        flat = [self._bytes.get((kind, dtype), 0) for kind in KINDS for dtype in DTYPES]
        flat += [self._calls.get(kind, 0) for kind in KINDS]
        self._bytes.clear()
        self._calls.clear()
        return flat


def summarize(per_rank: Tensor) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Merge drained counters of all ranks.

    Args:
        per_rank: int64 [ranks, len(KINDS) * len(DTYPES) + len(KINDS)], rows from `Traffic.drain`.

    Returns:
        (bytes by kind and dtype summed over ranks, calls by kind as the maximum over ranks);
        only entries that occurred.
    """
    split = len(KINDS) * len(DTYPES)
    # [ranks, kinds * dtypes] -> bytes of the whole job by kind and dtype
    sums = per_rank[:, :split].sum(0).tolist()
    # Stages differ in their calls: the largest number is that of the busiest rank.
    calls = per_rank[:, split:].max(0).values.tolist()
    comm_bytes: dict[str, dict[str, int]] = {}
    for index, value in enumerate(sums):
        if value:
            # row-major, as `drain` wrote it
            kind, dtype = KINDS[index // len(DTYPES)], DTYPES[index % len(DTYPES)]
            comm_bytes.setdefault(kind, {})[dtype_name(dtype)] = value
    return comm_bytes, {kind: n for kind, n in zip(KINDS, calls, strict=True) if n}
