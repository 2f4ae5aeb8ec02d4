"""The precision manifest: what ran in which precision, with what, and why.

`manifest.yaml` is written once and never rewritten. If a later start of the same run would record
something else, that is a new revision, `manifest-1.yaml`, `manifest-2.yaml`, ..., which names its
parent's sha256, so the files of a run form a chain.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import megafp8
from megafp8.config.megatron_flags import accepted_reason
from megafp8.config.run_config import RunConfig
from megafp8.errors import PrecisionError
from megafp8.precision.plan import PrecisionPlan
from megafp8.precision.recipe import recipe_fields

MANIFEST_VERSION = 1


def build_manifest(
    config: RunConfig,
    plan: PrecisionPlan,
    *,
    device: str = "cpu",
    backend: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Return the manifest's content as plain values.

    Args:
        config: The run.
        plan: Its precision plan.
        device: Where it runs, in words (`cpu`, a GPU's name).
        backend: Which backend makes the layers, asked, chosen and why; native if not given.
        extra: More top-level entries; names that are taken are an error.
    """
    asked = config.model.transformer_impl
    content: dict[str, Any] = {
        "format": MANIFEST_VERSION,
        "versions": {
            "megafp8": megafp8.__version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
            "numpy": _version("numpy"),
        },
        "device": device,
        "backend": dict(
            backend or {"asked": asked, "chosen": "native", "reason": f"--transformer-impl {asked}"}
        ),
        "compute_dtype": config.precision.compute_dtype,
        "recipe": recipe_fields(config),
        "plan": plan.as_dict(),
        "accepted_flags": [
            {"flag": flag, "effect": "none", "reason": accepted_reason(flag)}
            for flag in config.accepted_flags
        ],
    }
    taken = sorted(set(content) & set(extra))
    assert not taken, f"manifest entries given twice: {taken}"
    return {**content, **extra}


def write_manifest(folder: str | Path, content: Mapping[str, Any]) -> str:
    """Write a manifest, or find that the newest one says the same; call on one rank.

    Args:
        folder: The run folder; made if missing.
        content: What `build_manifest` returned.

    Returns:
        The sha256 of the bytes of the newest revision.

    Raises:
        PrecisionError: The newest manifest cannot be read.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = revisions(folder)
    if not found:
        return _write_new(folder / "manifest.yaml", {**content, "parent": None})
    stored = _read(found[-1])
    parent = hashlib.sha256(found[-1].read_bytes()).hexdigest()
    stored.pop("parent", None)
    if stored == yaml.safe_load(_dump(content)):
        return parent
    return _write_new(folder / f"manifest-{len(found)}.yaml", {**content, "parent": parent})


def revisions(folder: Path) -> list[Path]:
    """Return the manifests of a run folder, oldest first."""
    found = []
    path = folder / "manifest.yaml"
    while path.exists():
        found.append(path)
        path = folder / f"manifest-{len(found)}.yaml"
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise PrecisionError(f"{path}: cannot be read as a manifest: {reason}") from None
    if not isinstance(content, dict) or content.get("format") != MANIFEST_VERSION:
        raise PrecisionError(f"{path}: found no manifest of format {MANIFEST_VERSION}")
    return content


def _dump(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(content), sort_keys=False, width=100)


def _write_new(path: Path, content: Mapping[str, Any]) -> str:
    data = _dump(content).encode("utf-8")
    # Written beside and moved, so that a killed run leaves no half manifest to chain to.
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return hashlib.sha256(data).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
