"""The kernels of `transformer_engine_torch` that TE's unfused attention calls, in plain torch."""

from types import ModuleType

import torch
from torch import Tensor

MASKED = -10000.0  # what the CUDA kernel puts in place of a masked score


def scaled_softmax_forward(inputs: Tensor, scale: float) -> Tensor:
    """softmax(scale * inputs), fp32 inside."""
    return (inputs.float() * scale).softmax(-1).to(inputs.dtype)


def scaled_masked_softmax_forward(inputs: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same with scores masked where `mask` is True."""
    scores = (inputs.float() * scale).masked_fill(mask.bool(), MASKED)
    return scores.softmax(-1).to(inputs.dtype)


def softmax_backward(output_grads: Tensor, softmax_results: Tensor, scale: float) -> Tensor:
    """Gradient of the scores; a masked one is 0 as its probability is."""
    y, dy = softmax_results.float(), output_grads.float()
    dx = y * (dy - (y * dy).sum(-1, keepdim=True)) * scale
    return dx.to(torch.promote_types(output_grads.dtype, softmax_results.dtype))


def install(extension: ModuleType) -> None:
    """Give the stand-in its kernels."""
    kernels = {
        "scaled_softmax_forward": scaled_softmax_forward,
        "scaled_softmax_backward": softmax_backward,
        "scaled_masked_softmax_forward": scaled_masked_softmax_forward,
        "scaled_masked_softmax_backward": softmax_backward,
    }
    for name, kernel in kernels.items():
        setattr(extension, name, kernel)
