"""What `--precision auto` and `--fp8-recipe auto` take on which device: a table and its use.

Pure functions of a described device, so that any machine can be pretended. The description comes
from `launch.device`; a configuration enters training only after this step.

    device                                  precision             FP8 recipe
    CPU                                     BF16                  delayed, if FP8 is asked for
    CUDA 10.x (B200, B300)                  BF16 + FP8            mxfp8
    CUDA 8.9, 9.0 (Ada, H100, H200), 12.x   BF16 + FP8            delayed
    CUDA 8.x (A100), ROCm                   BF16                  delayed, emulated if asked for
    CUDA 7.x (V100, T4)                     FP16, loss scale      delayed, emulated if asked for
    CUDA before 7.0                         FP32                  delayed, emulated if asked for
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megafp8.config.recipes import DEFAULT_RECIPE, FP8_UNITS, RECIPES
from megafp8.errors import ConfigurationError

if TYPE_CHECKING:
    from megafp8.config.run_config import RunConfig


@dataclass(frozen=True)
class Hardware:
    """A device, described.

    Attributes:
        kind: what it is programmed with.
        name: in words.
        capability: CUDA compute capability; None for others.
    """

    kind: Literal["cpu", "cuda", "rocm"]
    name: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.capability is None:
            return self.name
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class PrecisionChoice:
    """What `auto` came to.

    Attributes:
        asked: the flags that said auto.
        hardware: the device it was decided for.
        taken: precision fields and their values.
        reason: in words.
    """

    asked: tuple[str, ...]
    hardware: str
    taken: dict[str, Any]
    reason: str

    def record(self) -> dict[str, Any]:
        """Return plain values for the manifest."""
        return {
            "asked": list(self.asked),
            "device": self.hardware,
            "taken": dict(self.taken),
            "reason": self.reason,
        }

    def __str__(self) -> str:
        taken = ", ".join(f"{name} {value}" for name, value in self.taken.items())
        return f"{' and '.join(self.asked)}: {taken} ({self.hardware}: {self.reason})"


def choose_recipe(hardware: Hardware) -> tuple[str, str]:
    """Return the FP8 recipe for a device and why."""
    if hardware.kind == "cpu":
        return DEFAULT_RECIPE, "FP8 is emulated on a CPU"
    if hardware.kind == "cuda" and hardware.capability is not None:
        for spec in reversed(RECIPES.values()):
            if spec.auto is not None and spec.units.has(hardware.capability):
                return spec.name, spec.auto
    return DEFAULT_RECIPE, "it has no FP8 matrix units"


def choose_precision(hardware: Hardware) -> tuple[dict[str, Any], str]:
    """Return the precision fields for a device and why."""
    if hardware.kind == "cpu":
        return {"bf16": True}, "a CPU emulates FP8, which is taken only if it is asked for by name"
    capability = hardware.capability
    if hardware.kind == "rocm" or capability is None:
        return {"bf16": True}, "FP8 is not supported on ROCm"
    if capability < (7, 0):
        return {}, "it has neither BF16 nor FP16 matrix units, FP32 is left"
    if capability < (8, 0):
        return {"fp16": True}, "it has FP16 matrix units and no BF16 ones; with a loss scale"
    if not FP8_UNITS.has(capability):
        return {"bf16": True}, "it has BF16 matrix units and no FP8 ones"
    recipe, reason = choose_recipe(hardware)
    # Hybrid gives gradients the range of E5M2; matrix units for blocks take E4M3 alone.
    return {"bf16": True, "fp8_format": RECIPES[recipe].formats[0], "fp8_recipe": recipe}, reason


def asks_for_auto(config: RunConfig) -> tuple[str, ...]:
    """Return the flags that leave a choice to the hardware."""
    precision = config.precision
    if precision.precision == "auto":
        return ("--precision auto",)
    return ("--fp8-recipe auto",) if precision.fp8 and precision.fp8_recipe == "auto" else ()


def for_hardware(config: RunConfig, hardware: Hardware) -> tuple[RunConfig, PrecisionChoice | None]:
    """Return the configuration with `auto` decided for a device, and the decision.

    A configuration without `auto` comes back as it is, with None.

    Raises:
        ConfigurationError: What was taken contradicts other flags.
    """
    from megafp8.config.checks import problems

    asked = asks_for_auto(config)
    if not asked:
        return config, None
    if asked == ("--precision auto",):
        taken, reason = choose_precision(hardware)
    else:
        recipe, reason = choose_recipe(hardware)
        if config.precision.fp8_format not in RECIPES[recipe].formats:
            reason = f"{recipe} is E4M3 in both directions, and hybrid is asked for"
            recipe = DEFAULT_RECIPE
        taken = {"fp8_recipe": recipe}
    # On a device without FP8 its flags have nothing to do: off by decision, not by oversight.
    fp8_off = {} if config.precision.fp8 else {"fp8_format": "none"}
    section = config.precision.model_copy(update={"precision": None, **fp8_off, **taken})
    resolved = config.model_copy(update={"precision": section})
    shown = taken or {"fp32": True}
    choice = PrecisionChoice(asked, str(hardware), shown, reason)
    for problem in problems(resolved):
        raise ConfigurationError(f"{choice}: {problem}")
    return resolved, choice
