"""Mean token loss over the first batches of a validation split; leaves no trace in FP8 state."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from megafp8.data.loader import BatchLoader, evaluation_batches
from megafp8.model import Model
from megafp8.model.batch import to_tensors
from megafp8.parallel.mesh import Mesh


def validation_loss(
    model: Model,
    loader: BatchLoader,
    mesh: Mesh,
    iterations: int,
    global_batch_size: int,
    stop: Callable[[], bool] | None = None,
) -> float | None:
    """Evaluate `iterations` global batches, always the same samples; a collective call.

    Args:
        model: evaluated as it is, its scales left alone.
        loader: of the validation split.
        mesh: of this rank.
        iterations: global batches.
        global_batch_size: samples of each.
        stop: asked before each global batch, on all ranks together and with the same answer;
            true ends the evaluation there.

    Returns:
        Sum of masked token losses / masked tokens, in nats; NaN if no token counts. None if it was
        ended early.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.world.device)
    paused = model.registry.paused() if model.registry is not None else nullcontext()
    model.set_training(False)
    try:
        with paused:
            evaluation = evaluation_batches(loader, iterations, global_batch_size)
            for number, batches in enumerate(evaluation):
                if stop is not None and stop():
                    return None
                micro_batches = to_tensors(batches, mesh, 0, number)
                totals[0] += model.runner.evaluate(micro_batches)
                if model.runner.has_last:
                    totals[1] += sum(float(batch["loss_mask"].sum()) for batch in batches)
    finally:
        model.set_training(True)
    mesh.loss.all_reduce(totals, "loss")
    loss, tokens = totals.tolist()
    return loss / tokens if tokens else float("nan")
