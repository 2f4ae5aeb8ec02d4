"""A rank's micro-batches as tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megafp8.layers.dropout import micro_batch_seed
from megafp8.parallel.mesh import Mesh


def to_tensors(
    batches: Sequence[Mapping[str, Any]], mesh: Mesh, seed: int, iteration: int
) -> list[dict[str, Tensor]]:
    """Move loader output to this rank's device and name each micro-batch's random streams.

    Args:
        batches: numpy dicts `tokens labels position_ids` int64 [b, s], `loss_mask` fp32 [b, s].
        mesh: the grid; gives device and data-parallel rank.
        seed: run seed.
        iteration: 0-based iteration; with the micro-batch's number it names the dropout masks.

    Returns:
        Dicts of tensors with the same keys and `seed` int64 [1], which stays on the CPU.
    """
    device = mesh.world.device
    result = []
    for number, batch in enumerate(batches):
        tensors = {
            key: torch.from_numpy(value).to(device, non_blocking=True)
            for key, value in batch.items()
        }
        key = micro_batch_seed(seed, iteration, number, mesh.dp_rank)
        tensors["seed"] = torch.tensor([key], dtype=torch.int64)
        result.append(tensors)
    return result
