"""TE's user buffers: tensor-parallel gathers and scatters that run under the GEMMs they feed.

The buffers are TE's own, one set per process. They are made before the layers, whose constructors
look for them by name, and keyed by precision: BF16 linears of an FP8 model need a set of theirs.
Traffic that goes through them is not counted in `metrics.jsonl`: no collective is called.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.base import is_ub_initialized

from megafp8.config.user_buffers import UserBufferOptions
from megafp8.errors import ConfigurationError

# Last part of a canonical module name -> TE's.
NAMES = {"linear_qkv": "qkv", "linear_proj": "proj", "linear_fc1": "fc1", "linear_fc2": "fc2"}


@dataclass(frozen=True)
class Switches:
    """A linear's `ub_*` arguments.

    Attributes:
        name: qkv, proj, fc1 or fc2; None without overlap.
        gather, scatter: overlap of the forward pass, and of row-parallel gradients.
        scatter_dgrad: the input gradient is scattered under its own GEMM.
        bulk: x is gathered under dgrad, and the input gradient scattered under wgrad.
    """

    name: str | None = None
    gather: bool = False
    scatter: bool = False
    scatter_dgrad: bool = False
    bulk: bool = False


NO_OVERLAP = Switches()


def switches(options: UserBufferOptions | None, name: str) -> Switches:
    """The arguments of a linear, by its canonical name."""
    if options is None:
        return NO_OVERLAP
    layer = NAMES[name.rpartition(".")[2]]
    scatters = options.scatters_dgrad(layer)
    return Switches(layer, True, True, scatters, not scatters)


def initialize(options: UserBufferOptions, tp_size: int) -> None:
    """Make the buffers, in place of those of a former model; a call on all ranks.

    Raises:
        ConfigurationError: tensor-parallel ranks of more than one node.
    """
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", tp_size))
    if on_node % tp_size:
        raise ConfigurationError(
            f"--tp-comm-overlap: {tp_size} tensor-parallel ranks do not divide the {on_node} ranks "
            "of a node; user buffers reach over NVLink, within a node"
        )
    destroy()
    modes, settings = [], []
    if options.fp8:
        modes.append(te.UserBufferQuantizationMode.FP8)
    if options.high_precision:
        modes.append(te.UserBufferQuantizationMode.NONE)
    for _ in modes:
        settings.append(_for_mode(options, first=not settings))
    te.initialize_ub(
        shape=[options.tokens, options.hidden_size],
        tp_size=tp_size,
        quantization_modes=modes,
        dtype=torch.bfloat16,
        ub_cfgs=settings,
        bootstrap_backend=options.bootstrap_backend,
    )


def _for_mode(options: UserBufferOptions, first: bool) -> dict[str, dict[str, Any]]:
    """A copy of the settings for one precision.

    TE 2.20 moves a dgrad that scatters between its tables of methods when it meets the method, and
    fails when it meets it a second time. Once moved, it has the method without being told.
    """
    return {
        gemm: {
            key: value
            for key, value in values.items()
            if first or key != "method" or not gemm.endswith("dgrad") or value == "bulk"
        }
        for gemm, values in options.settings.items()
    }


def destroy() -> None:
    """Free the buffers, if there are any."""
    if is_ub_initialized():
        te.destroy_ub()
