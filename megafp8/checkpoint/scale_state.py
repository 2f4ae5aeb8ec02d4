"""FP8 scale state of a checkpoint into a registry whose window may have another length."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint.record import CheckpointRecord
from megafp8.log import get_logger
from megafp8.numerics import ScaleRegistry

log = get_logger(__name__)


def scale_targets(registry: ScaleRegistry | None, record: CheckpointRecord) -> dict[str, Tensor]:
    """Empty tensors for the registry's entries, with the shapes that the checkpoint has."""
    if registry is None:
        return {}
    targets = {}
    for name, value in registry.tensors().items():
        saved = record.tensors.get(name)
        shape = tuple(value.shape) if saved is None else saved.shape
        targets[name] = torch.zeros(shape, dtype=torch.float32)
    return targets


def take_scales(
    registry: ScaleRegistry | None,
    targets: Mapping[str, Tensor],
    missing: Collection[str],
    path: Path,
) -> None:
    """Hand loaded scale state to the registry; what was missing starts anew, with one warning.

    Args:
        registry: of this rank; None without FP8.
        targets: from `scale_targets`, filled.
        missing: names that the checkpoint lacks.
        path: of the checkpoint, for the warning.
    """
    if registry is None:
        return
    fresh = registry.load({name: t for name, t in targets.items() if name not in missing})
    if fresh:
        log.warning(
            "%s holds no scale state for %d of this rank's %d FP8 tensors; they start with scale 1 "
            "and an empty history",
            path,
            fresh,
            len(registry),
        )
