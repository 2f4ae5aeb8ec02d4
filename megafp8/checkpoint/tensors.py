"""Tensors of checkpoints as bytes, and work on many of them within a budget of memory."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from isal.isal_zlib import crc32
from torch import Tensor

from megafp8.checkpoint.record import TensorEntry
from megafp8.errors import CheckpointError

# Bytes of tensors that may be in memory at once; a larger tensor is alone there.
BUFFER_BYTES = 64 * 2**20
# Reading, checksums and writing release the interpreter's lock, so threads are enough.
WORKERS = max(2, min(8, os.cpu_count() or 2))


def entry_of(tensor: Tensor) -> TensorEntry:
    """Return the (global) shape and the dtype of a tensor."""
    return TensorEntry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def dtype_of(entry: TensorEntry) -> torch.dtype:
    """Return the torch dtype of an entry.

    Raises:
        CheckpointError: torch has no dtype of that name.
    """
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype {entry.dtype!r} is not one of torch's")
    return dtype


def bytes_of(entry: TensorEntry) -> int:
    """Return the bytes of a tensor's values."""
    return torch.Size(entry.shape).numel() * dtype_of(entry).itemsize


def bytes_view(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor in row-major order, uint8 over the same memory."""
    assert tensor.is_contiguous()
    # A dimension of length 1 may have any stride, which a tensor of one value keeps when flattened,
    # and which `view` with another dtype refuses.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def buffer_of(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor as a numpy array over the same memory."""
    return bytes_view(tensor).numpy()  # a buffer, which its stub does not say


def crc32_of_tensor(tensor: Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes in row-major order, eight hexadecimal digits."""
    return f"{crc32(buffer_of(tensor.contiguous())):08x}"


def in_order(
    items: Iterable[tuple[Any, int]],
    work: Callable[[Any], Any],
    budget: int = BUFFER_BYTES,
) -> Iterator[Any]:
    """Do `work` on items in threads and yield the results in the items' order.

    Args:
        items: (argument of `work`, bytes that its result holds).
        work: called in a thread.
        budget: bytes of results that may wait or be worked on; one larger item goes alone.
    """
    waiting: deque[tuple[Future[Any], int]] = deque()
    held = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for item, size in items:
                while waiting and (held + size > budget or len(waiting) >= 4 * WORKERS):
                    future, done = waiting.popleft()
                    yield future.result()
                    held -= done
                waiting.append((pool.submit(work, item), size))
                held += size
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for future, _ in waiting:
                future.cancel()
