"""Scale state of modules that keep TE's own, to and from the canonical form of checkpoints.

Modules of this package have no state of their own (`registry_quantizers.py`). Stock TE modules (a
model built elsewhere) hold theirs in `fp8_meta`: `scale` [slots] and `amax_history` [H, slots],
whose row 0 stages the running amax and whose rows 1..H-1 are finished entries, oldest first. In
canonical form:
`fp8.<name>.<role>.scale` (fp32) and `.amax_history` (fp32 [H], newest last, 0 = unfilled); TE has
no place for the oldest of H entries. No pickle is read or written.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor

from megafp8.errors import PrecisionError

# (gemm, role, direction, slot); csrc/common.h and cpp_extensions/fused_attn.py of TE 2.20.
_ONE = (
    ("", "input", "scaling_fwd", 0),
    ("", "weight", "scaling_fwd", 1),
    ("", "grad_output", "scaling_bwd", 0),
)
_MLP = (
    ("fc1", "input", "scaling_fwd", 0),
    ("fc1", "weight", "scaling_fwd", 1),
    ("fc1", "grad_output", "scaling_bwd", 0),
    ("fc2", "input", "scaling_fwd", 3),
    ("fc2", "weight", "scaling_fwd", 4),
    ("fc2", "grad_output", "scaling_bwd", 2),
)
_ATTENTION = (
    ("", "qkv", "scaling_fwd", 2),
    ("", "output", "scaling_fwd", 3),
    ("", "softmax", "scaling_fwd", 8),
    ("", "grad_qkv", "scaling_bwd", 0),
    ("", "grad_output", "scaling_bwd", 3),
    ("", "grad_softmax", "scaling_bwd", 5),
)


def _layout(module: Any) -> tuple[int, tuple[tuple[str, str, str, int], ...]]:
    """(GEMMs of the module as TE counts them, its used slots)."""
    if isinstance(module, te.GroupedLinear):
        experts = range(module.num_gemms)  # GEMM-major: 3 forward and 2 backward slots each
        slots = [
            (f"expert{i}", role, key, (3 if key == "scaling_fwd" else 2) * i + slot)
            for i in experts
            for _, role, key, slot in _ONE
        ]
        return module.num_gemms, tuple(slots)
    if isinstance(module, te.LayerNormMLP):
        return 2, _MLP
    if isinstance(module, te.DotProductAttention):
        return 3, _ATTENTION
    if isinstance(module, (te.Linear, te.LayerNormLinear)):
        return 1, _ONE
    raise PrecisionError(
        f"{type(module).__name__} has no known slots; known are Linear, LayerNormLinear, "
        "LayerNormMLP, GroupedLinear and DotProductAttention"
    )


def _slots(module: Any, name: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (canonical prefix, scale, history column) of every used slot, as live views."""
    for gemm, role, key, slot in _layout(module)[1]:
        prefix = ".".join(part for part in ("fp8", name, gemm, role) if part)
        state = module.fp8_meta[key]
        yield prefix, state.scale[slot], state.amax_history[:, slot]


def export_state(module: Any, name: str) -> dict[str, Tensor]:
    """Copy a module's scale state out of TE.

    Args:
        module: a TE module that has run FP8 with delayed scaling.
        name: its canonical name, the middle of the keys.

    Raises:
        PrecisionError: an unknown kind of module, or one without state.
    """
    _layout(module)
    if "scaling_fwd" not in module.fp8_meta or "scaling_bwd" not in module.fp8_meta:
        raise PrecisionError(
            f"{name}: has no FP8 state yet; TE makes it with the first FP8 forward"
        )
    found = {}
    for prefix, scale, history in _slots(module, name):
        found[f"{prefix}.scale"] = scale.clone()
        window = torch.zeros_like(history)
        window[1:] = history[1:]
        found[f"{prefix}.amax_history"] = window
    return found


@torch.no_grad()
def import_state(module: Any, name: str, state: Mapping[str, Tensor], recipe: Any) -> int:
    """Write scale state into a module, in place: quantizers and TE's buffers hold views.

    The window takes the newest entries that it has room for, H - 1 of them. A slot without both of
    its entries in `state` starts anew.

    Args:
        module: a TE module, perhaps one that has not run yet.
        name: its canonical name.
        state: canonical tensors; other names are left alone.
        recipe: TE's recipe, for a module that has no state yet.

    Returns:
        How many slots started anew.
    """
    count, _ = _layout(module)
    if "scaling_fwd" not in module.fp8_meta:
        module.fp8_meta["num_gemms"], module.fp8_meta["recipe"] = count, recipe
        module.init_fp8_meta_tensors(recipe)
    fresh = 0
    for prefix, scale, history in _slots(module, name):
        saved, window = state.get(f"{prefix}.scale"), state.get(f"{prefix}.amax_history")
        history.zero_()
        if saved is None or window is None:
            scale.fill_(1.0)
            fresh += 1
            continue
        scale.copy_(saved.reshape(()))
        entries = (
            window[window > 0][-(history.shape[0] - 1) :] if history.shape[0] > 1 else window[:0]
        )
        if entries.numel():
            history[-entries.numel() :] = entries.to(history.device)
    return fresh
