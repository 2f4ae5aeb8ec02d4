"""Figures of a run beside the loss: memory, parameter norm."""

import resource
import sys

import torch

from megafp8.train.step import TrainingStep


def memory_peak_bytes(device: torch.device) -> int:
    """This rank's peak so far in bytes: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def parameter_norm(step: TrainingStep) -> float:
    """Global 2-norm of the fp32 master weights, each parameter counted once."""
    return float(step.gradients.parameter_norm())
