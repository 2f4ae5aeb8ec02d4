"""Whether TransformerEngine can be used here, with the reason, and the environment it runs in.

TE reads several defaults of its recipes from the environment when it is imported. The ones that
change numbers are set here before that import, unless the user has set them, and every NVTE_
variable goes into the run's records.
"""

import importlib
import importlib.util
import os
import re
from importlib import metadata
from types import ModuleType

import torch

from megafp8.config.recipes import RECIPES
from megafp8.errors import PrecisionError

MINIMUM = (2, 20)
INSTALL = "install it with: pip install --no-build-isolation -e .[te] (in the project's folder)"
# Name -> the value TE has without the variable; set so that a change of its default shows.
PINNED = {
    "NVTE_FP8_DPA_BWD": "1",
    "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "0",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "0",
}
# Variables that would put another recipe than the run's in its place, and where.
REFUSED = {
    "NVTE_BACKWARD_OVERRIDE": "delayed scaling",
    "NVTE_DPA_FP8_RECIPE": "an attention core in the run's recipe",
}
# --attention-backend -> which of TE's attention cores may be taken.
CORES = {"flash": "NVTE_FLASH_ATTN", "fused": "NVTE_FUSED_ATTN", "unfused": "NVTE_UNFUSED_ATTN"}
# What a package without its extension, its CUDA libraries or its metadata raises when imported.
_IMPORT_ERRORS = (ImportError, AssertionError, FileNotFoundError, OSError, RuntimeError)


def version() -> str | None:
    """Version of the installed TE, without importing it; None if there is none."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:  # a bare folder of that name is no package
        return None
    try:
        return metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return "unknown"


def available(recipe: str | None = None) -> tuple[bool, str]:
    """Say whether TE's layers can be used in this process.

    Args:
        recipe: FP8 recipe that is wanted too, as `--fp8-recipe` names it; None without FP8.

    Returns:
        (True, "TransformerEngine <version>") or (False, the reason and what to do).
    """
    found = version()
    if found is None:
        return False, f"the package transformer_engine is not installed; {INSTALL}"
    parsed = _numbers(found)
    if parsed is None or parsed < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        return False, f"TransformerEngine {found} is installed, {wanted} or later is needed; " + (
            INSTALL
        )
    if not torch.cuda.is_available():
        return False, "TransformerEngine needs a CUDA device and torch sees none; use native"
    try:
        te = import_te()
    except _IMPORT_ERRORS as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        return False, f"TransformerEngine {found} cannot be imported ({said}); {INSTALL}"
    if recipe is not None:
        able, reason = _fp8(te, recipe)
        if not able:
            return False, f"TransformerEngine {found} has no FP8 recipe {recipe} here: {reason}"
    return True, f"TransformerEngine {found}"


def _fp8(te: ModuleType, recipe: str) -> tuple[bool, str]:
    """Whether this device runs a recipe, by TE's own checks, with the reason."""
    theirs = RECIPES[recipe].transformer_engine
    assert theirs is not None  # else refused by `config.transformer_engine`
    if theirs.recipe == "MXFP8BlockScaling":
        able, reason = te.is_mxfp8_available(return_reason=True)
    elif theirs.recipe == "Float8BlockScaling":
        able, reason = te.is_fp8_block_scaling_available(return_reason=True)
    else:
        able, reason = te.is_fp8_available(return_reason=True)
    if able and theirs.replaced_by is not None:
        capability, other = torch.cuda.get_device_capability(), theirs.replaced_by
        if not RECIPES[recipe].units.has(capability):
            return False, (
                f"compute capability {capability[0]}.x has no such GEMM, and TransformerEngine "
                f"replaces it by {other.upper()}'s; allowed: {other} by name"
            )
    return able, reason


def _numbers(text: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def import_te() -> ModuleType:
    """Set the variables that change numbers and import `transformer_engine.pytorch`.

    Raises:
        PrecisionError: a variable that the run's recipe cannot run with.
        ImportError, AssertionError, OSError, RuntimeError: as TE raises them.
    """
    for name, what in REFUSED.items():
        if os.environ.get(name):
            raise PrecisionError(
                f"{name} is {os.environ[name]} in the environment; {what} needs it unset: unset "
                f"{name}"
            )
    for name, value in PINNED.items():
        os.environ.setdefault(name, value)
    return importlib.import_module("transformer_engine.pytorch")


def select_core(name: str) -> None:
    """Allow one of TE's attention cores alone; `auto` and `local` leave the environment as it is.

    TE reads the variables when a core is called first.

    Raises:
        PrecisionError: the environment says otherwise.
    """
    if name not in CORES:
        return
    for core, variable in CORES.items():
        wanted = "1" if core == name else "0"
        found = os.environ.setdefault(variable, wanted)
        if found != wanted:
            raise PrecisionError(
                f"--attention-backend {name} needs {variable}={wanted}, found {found} in the "
                f"environment: unset {variable}"
            )


def environment() -> dict[str, str]:
    """Every NVTE_ variable of this process, for the run's records."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith("NVTE_")}
