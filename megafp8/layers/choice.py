"""Which backend makes the layers of a run, and why."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megafp8.config import RunConfig
from megafp8.config.transformer_engine import transformer_engine_refusal
from megafp8.config.user_buffers import UserBufferOptions
from megafp8.errors import ConfigurationError, PrecisionError
from megafp8.layers import apex, transformer_engine
from megafp8.layers.backend import Backend
from megafp8.layers.native import NativeBackend
from megafp8.numerics import Recipe, products
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
        PrecisionError: TransformerEngine is asked for and cannot be used, with the reason; or the
            environment forbids the attention core that is asked for.
        ConfigurationError: apex's norms are asked for and cannot be used.
    """
    if config.model.norm_impl == "apex":
        usable, reason = apex.norms_available()
        if not usable:
            raise ConfigurationError(f"--norm-impl apex: {reason}; this project's own: native")
    asked = config.model.transformer_impl
    if asked not in ("auto", "transformer_engine"):
        return BackendChoice(asked, "native", f"--transformer-impl {asked}")
    refusal = transformer_engine_refusal(config)
    recipe = config.precision.recipe.name if config.precision.fp8 else None
    usable, reason = (False, refusal) if refusal else transformer_engine.available(recipe)
    if usable:
        transformer_engine.select_core(config.model.attention_backend)
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


def add_products(choice: BackendChoice, dtype: torch.dtype, device: torch.device) -> BackendChoice:
    """Record with the backend how a CPU multiplies BF16, in a run that computes in it."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return choice
    return replace(
        choice, details={**choice.details, "bf16_products": products.cpu_products().record()}
    )


def make_backend(
    choice: BackendChoice,
    config: RunConfig,
    recipe: Recipe | None,
    mesh: Mesh,
    user_buffers: UserBufferOptions | None = None,
) -> Backend:
    """Make the chosen backend for this rank's stages.

    Args:
        choice: which.
        config: the run.
        recipe: of the run; None without FP8.
        mesh: the grid.
        user_buffers: of `--tp-comm-overlap`, which the native backend does not have.
    """
    if choice.chosen == "native":
        assert user_buffers is None
        return NativeBackend()
    # Imported here: it imports TransformerEngine.
    from megafp8.layers.transformer_engine.backend import TeOptions, TransformerEngineBackend

    options = TeOptions(
        fused_norms=config.model.te_fused_norms,
        core=config.model.attention_backend != "local",
        fp8_core=config.precision.fp8_attention == "dpa",
        user_buffers=user_buffers,
    )
    return TransformerEngineBackend(recipe, mesh, options)


def close_backend(choice: BackendChoice) -> None:
    """Free what a backend holds outside of its modules, before the process group goes."""
    if choice.chosen == "transformer_engine":
        from megafp8.layers.transformer_engine.user_buffers import destroy

        destroy()
