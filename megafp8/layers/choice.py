"""Which backend makes the layers of a run, and why."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megafp8.config import RunConfig
from megafp8.config.backend import transformer_engine_refusal
from megafp8.errors import PrecisionError
from megafp8.layers import transformer_engine
from megafp8.layers.backend import Backend
from megafp8.layers.native import NativeBackend
from megafp8.numerics import Recipe
from megafp8.numerics.kernels import EAGER, KernelChoice, choose_kernels
from megafp8.parallel.mesh import Mesh


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a run.

    Attributes:
        asked: `--transformer-impl`.
        chosen: "native" or "transformer_engine".
        reason: why.
        details: version and environment that belong to it.
    """

    asked: str
    chosen: str
    reason: str
    details: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        head = {"asked": self.asked, "chosen": self.chosen, "reason": self.reason}
        return {**head, **self.details}


def choose_backend(config: RunConfig) -> BackendChoice:
    """Choose by `--transformer-impl`; needs no process group.

    Raises:
        PrecisionError: TransformerEngine is asked for and cannot be used, with the reason.
    """
    asked = config.model.transformer_impl
    if asked not in ("auto", "transformer_engine"):
        return BackendChoice(asked, "native", f"--transformer-impl {asked}")
    refusal = transformer_engine_refusal(config)
    usable, reason = (
        (False, refusal) if refusal else transformer_engine.available(config.precision.fp8)
    )
    if usable:
        reason = reason if asked == "auto" else f"--transformer-impl {asked}"
        return BackendChoice(
            asked,
            "transformer_engine",
            f"auto takes it where it can be used: {reason}" if asked == "auto" else reason,
            {
                "version": transformer_engine.version(),
                "environment": transformer_engine.environment(),
            },
        )
    if asked == "transformer_engine":
        raise PrecisionError(f"--transformer-impl transformer_engine: {reason}")
    return BackendChoice(asked, "native", f"auto takes native: {reason}")


def add_kernels(
    choice: BackendChoice, config: RunConfig, device: torch.device
) -> tuple[BackendChoice, KernelChoice]:
    """Choose what quantizes by `--fp8-kernels` and record it with the backend.

    Raises:
        PrecisionError: Triton kernels are asked for and cannot be used, with the reason.
    """
    asked = config.precision.fp8_kernels
    if not config.precision.fp8:
        return choice, EAGER
    if choice.chosen != "native":
        if asked == "triton":
            raise PrecisionError(
                f"--fp8-kernels triton: kernels of the native backend, found {choice.chosen}; "
                "allowed with it: auto, eager"
            )
        return choice, EAGER
    kernels = choose_kernels(asked, device)
    details = {**choice.details, "fp8_kernels": kernels.record()}
    return replace(choice, details=details), kernels


def make_backend(choice: BackendChoice, recipe: Recipe | None, mesh: Mesh) -> Backend:
    """Make the chosen backend for this rank's stages."""
    if choice.chosen == "native":
        return NativeBackend()
    # Imported here: it imports TransformerEngine.
    from megafp8.layers.transformer_engine.backend import TransformerEngineBackend

    return TransformerEngineBackend(recipe, mesh)
