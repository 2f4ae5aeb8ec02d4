"""Which implementation quantizes: the Triton kernels, or plain torch operations."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from megafp8.errors import PrecisionError

KERNELS = ("auto", "triton", "eager")


@dataclass(frozen=True)
class KernelChoice:
    """What quantizes, and why.

    Attributes:
        asked: "auto", "triton" or "eager".
        chosen: "triton" or "eager".
        reason: in words.
    """

    asked: str
    chosen: str
    reason: str

    @property
    def fused(self) -> bool:
        """Whether the Triton kernels run."""
        return self.chosen == "triton"

    def record(self) -> dict[str, str]:
        """Return plain values for a run's records."""
        return {"asked": self.asked, "chosen": self.chosen, "reason": self.reason}


EAGER = KernelChoice("eager", "eager", "plain torch operations")


def choose_kernels(asked: str, device: torch.device | str) -> KernelChoice:
    """Decide for a device; `auto` takes Triton where it can run.

    Raises:
        PrecisionError: `triton` where it cannot run, with the reason.
    """
    assert asked in KERNELS, asked
    if asked == "eager":
        return KernelChoice(asked, "eager", "asked for by name")
    usable, reason = available(device)
    if usable:
        return KernelChoice(asked, "triton", reason)
    if asked == "triton":
        raise PrecisionError(f"--fp8-kernels triton: {reason}; allowed here: auto, eager")
    return KernelChoice(asked, "eager", reason)


def available(device: torch.device | str) -> tuple[bool, str]:
    """Say whether Triton kernels can run on `device`, with the reason."""
    device = torch.device(device)
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    interpreted = interpreting()
    if device.type == "cuda" and not interpreted:
        if torch.version.hip is not None:
            return False, "ROCm is not supported"
        # Older ones have no conversion to E4M3.
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            major, minor = capability
            return False, f"compute capability {major}.{minor}; casts to E4M3 need 8.9"
        return True, f"triton {_version()} on CUDA"
    if interpreted:
        return True, f"triton {_version()}, interpreted (TRITON_INTERPRET)"
    return False, f"triton needs a CUDA device (or TRITON_INTERPRET=1), found {device.type}"


def interpreting() -> bool:
    """Whether Triton runs kernels in its CPU interpreter, which it decides when it is imported."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def _version() -> str:
    import triton

    return triton.__version__
