"""A parameter as an optimizer sees it: this rank's rows, and the way to the whole matrix."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from megafp8.layers.parameters import gradient_like


@dataclass(frozen=True, eq=False)
class NamedShard:
    """One parameter as the optimizer sees it.

    Attributes:
        name: Canonical name.
        shard: This rank's rows, fp32 and contiguous, without a graph; zero rows are allowed. It is
            updated in place, and its `.grad` (same shape and layout) is what the step uses.
        decay: Whether weight decay applies, see `ParameterSpec.decays`.
        parameter: What the shard is a part of, with global shape, device mesh and placements; None
            where the shard is all of it.
    """

    name: str
    shard: torch.Tensor
    decay: bool
    parameter: DTensor | None = None

    def whole(self, mine: torch.Tensor) -> torch.Tensor:
        """Gather a tensor that is split as the parameter; a collective call of the stage's ranks.

        Args:
            mine: This rank's part, of the shard's shape: the shard, its gradient or its momentum.

        Returns:
            The tensor of the parameter's global shape, the same on all these ranks.
        """
        if self.parameter is None:
            return mine
        return gradient_like(mine, self.parameter).full_tensor()

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of the global shape, a view of the shard's shape."""
        if self.parameter is None:
            return whole
        (chunk,) = self.parameter.__create_chunk_list__()
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            whole = whole.narrow(dim, offset, size)
        return whole
