"""Stateless random streams for dropout.

A mask depends on (seed, iteration, micro-batch, data-parallel rank, site) and, where ranks hold
different elements, on the tensor-parallel rank. Nothing is drawn from a default generator, so an
extra draw elsewhere changes nothing, recompute replays the same mask, and a resumed run needs no
generator state: its iteration number is enough.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def stream_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts by BLAKE2b: equal parts give equal seeds on every platform."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def dropout_mask(shape: torch.Size, p: float, seed: int, device: torch.device) -> Tensor:
    """A bool mask of `shape`, True (keep) with probability 1 - p, from its own generator."""
    # A generator of its own: the mask does not depend on what was drawn before.
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.rand(shape, generator=generator, device=device) >= p


@contextmanager
def default_generator_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the default generator inside, restore it after: for SDPA, which takes no generator."""
    # Fork_rng keeps the CPU's state in any case, and all GPUs' unless told which.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
