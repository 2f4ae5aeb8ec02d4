"""Figures of a run beside the loss: memory, parameter norm, zeros among gradients."""

import resource
import sys

import torch
import torch.distributed as dist

from megafp8.parallel.mesh import Mesh
from megafp8.train.step import TrainingStep


def memory_peak_bytes(mesh: Mesh) -> int:
    """Largest peak of any rank so far: allocated on the GPU, resident on the CPU."""
    device = mesh.world.device
    if device.type == "cuda":
        mine = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        mine = peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
    peak_tensor = torch.tensor([mine], dtype=torch.int64, device=device)
    dist.all_reduce(peak_tensor, op=dist.ReduceOp.MAX)
    return int(peak_tensor)


@torch.no_grad()
def parameter_norm(step: TrainingStep) -> float:
    """Global 2-norm of the fp32 master weights, each parameter counted once."""
    gradients = step.gradients
    square = torch.zeros((), dtype=torch.float64, device=gradients.mesh.world.device)
    for entry in gradients.entries:
        if entry.counts:
            square += entry.shard.double().square().sum()
    gradients.mesh.model.all_reduce(square, "grad_norm")
    return float(square.sqrt())
