"""Values that no training can have written on purpose, whatever their checksums say."""

import torch
from torch import Tensor

from megafp8.checkpoint.rank_scales import LOCAL_PREFIX, SHARED_PREFIX

_SHOWN = 5


def flaw(name: str, tensor: Tensor) -> str | None:
    """Return what is wrong with a tensor's values as the end of a sentence, None if nothing is.

    Cases: a value that is not finite -> wrong in every tensor of floating point, except an inf
    among amaxes, which may freeze a scale; a negative one -> wrong in second moments, step counters
    and amaxes; zero or a negative one -> wrong in scales;
    a fraction -> wrong in step counters.

    Args:
        name: canonical name in a checkpoint.
        tensor: the values, whole or in part.
    """
    step = name.startswith("optimizer.") and name.endswith(".step")
    if not tensor.numel() or not (tensor.is_floating_point() or step):
        return None
    values = tensor.float() if tensor.itemsize == 1 else tensor  # no minimum of FP8 in torch
    # One pass and one wait for the device, and NaN comes through.
    lowest, highest = (float(value) for value in torch.stack(values.detach().aminmax()).tolist())
    inf = float("inf")
    if not (lowest > -inf and (highest < inf or _is_amax(name))):
        bad = values.numel() - int(values.isfinite().sum())
        return f"holds {bad} values that are not finite"
    if _is_scale(name) and lowest <= 0:
        return f"holds a scale of {lowest:g}, expected positive ones"
    if lowest < 0 and (step or _is_never_negative(name)):
        return f"holds {int((values < 0).sum())} negative values, down to {lowest:g}"
    if step and (lowest % 1 or highest % 1):
        return f"holds {lowest:g} steps, expected a whole number"
    return None


def _is_scale(name: str) -> bool:
    return name.startswith((SHARED_PREFIX, LOCAL_PREFIX)) and name.endswith(".scale")


def _is_amax(name: str) -> bool:
    return name.startswith((SHARED_PREFIX, LOCAL_PREFIX)) and name.endswith(".amax_history")


def _is_never_negative(name: str) -> bool:
    if name.startswith("optimizer."):
        return name.endswith("exp_avg_sq")  # a mean of squares, or its maximum
    return _is_amax(name)


def summary(flaws: list[str]) -> str:
    """Return the first few flaws and how many more there are."""
    more = f"; and {len(flaws) - _SHOWN} more tensors" if len(flaws) > _SHOWN else ""
    return "; ".join(flaws[:_SHOWN]) + more
