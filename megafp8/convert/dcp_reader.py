"""What values in Megatron's files are, and why one cannot be read."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megafp8.checkpoint.reader import ShardReader


def reason_of(error: Exception) -> str:
    """Return an error of `torch.load` in one line, without its advice to load without care."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if "weights_only" in text or "Weights only" in text:
        return f"{type(error).__name__}: damaged, or it names what is no data"
    return text[:200]


def is_empty(value: object) -> bool:
    """Tell whether a module's extra state is none: None, no elements, or a list of such."""
    if isinstance(value, (list, tuple)):
        return all(is_empty(item) for item in value)
    return value is None or (isinstance(value, Tensor) and value.numel() == 0)


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Tell whether a pickled value is a tensor whose elements are all in memory, one by one."""
    # Pickles also hold sparse and quantized tensors, and ones without data.
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.device.type == "cpu" and not value.is_quantized


def holds_data(tensors: ShardReader, place: _StorageInfo) -> bool:
    """Tell whether a stored object (no tensor) is more than None or an empty tensor."""
    try:
        return not is_empty(tensors.read_object(place))
    except Exception:  # an object of a class that is not read here is no empty one
        return True
