"""Mean token loss over the first batches of a validation split; leaves no trace in FP8 state."""

from contextlib import nullcontext

import torch

from megafp8.data.loader import BatchLoader, evaluation_batches
from megafp8.model import Model
from megafp8.model.batch import to_tensors
from megafp8.parallel.mesh import Mesh


def validation_loss(
    model: Model, loader: BatchLoader, mesh: Mesh, iterations: int, global_batch_size: int
) -> float:
    """Evaluate `iterations` global batches, always the same samples; a collective call.

    Returns:
        Sum of masked token losses / masked tokens, in nats; NaN if no token counts.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.world.device)
    paused = model.registry.paused() if model.registry is not None else nullcontext()
    model.set_training(False)
    try:
        with paused:
            evaluation = evaluation_batches(loader, iterations, global_batch_size)
            for number, batches in enumerate(evaluation):
                micro_batches = to_tensors(batches, mesh, 0, number)
                totals[0] += model.runner.evaluate(micro_batches)
                if model.runner.has_last:
                    totals[1] += sum(float(batch["loss_mask"].sum()) for batch in batches)
    finally:
        model.set_training(True)
    mesh.loss.all_reduce(totals, "loss")
    loss, tokens = totals.tolist()
    return loss / tokens if tokens else float("nan")
