"""TransformerEngine's own Python on a CPU: a stand-in for its compiled extension.

    from tests.support import te_cpu
    te = te_cpu.load()                     # transformer_engine.pytorch, on "device 9.0"

It judges TE's Python (state, slots, contexts, gathers, gradients), never NVIDIA's kernels. `load`
patches torch for the whole process, so only processes of their own may call it: worker processes
of `tests.support.ranks`, or a subprocess.
"""

import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType

ENVIRONMENT = {
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_FLASH_ATTN": "0",
    "NVTE_FUSED_ATTN": "0",
}
SITE = Path(__file__).resolve().parents[3] / ".venv/te"  # where scripts/test.sh installs it
_LOADED: list[ModuleType] = []


def missing() -> str | None:
    """Say why the double cannot be loaded here; None if it can."""
    for name in ("transformer_engine", "einops", "packaging"):
        if importlib.machinery.PathFinder.find_spec(name, [*sys.path, str(SITE)]) is None:
            return f"{name} is not installed; scripts/test.sh installs requirements-te.txt"
    return None


def load(native_gemm: bool = False) -> ModuleType:
    """Import TE with the emulated extension and report a CUDA device; once per process.

    Args:
        native_gemm: multiply with `megafp8.numerics`' products, to compare bit by bit.
    """
    import torch  # noqa: F401  (TE wants torch to be there first)

    from tests.support.te_cpu import attention, emulation, pretend, stub

    emulation.NATIVE_GEMM[0] = native_gemm
    if not _LOADED:
        if str(SITE) not in sys.path:
            sys.path.append(str(SITE))
        os.environ.update(ENVIRONMENT)
        extension = stub.install()
        emulation.install(extension)
        attention.install(extension)
        _LOADED.append(stub.import_te(extension))
        pretend.cuda()
    return _LOADED[0]
