"""Configuration: frozen models, command line and YAML, checks, sizes. Imports no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megafp8.config.cli import load_config
    from megafp8.config.environment import LaunchEnvironment
    from megafp8.config.layout import Layout
    from megafp8.config.run_config import RunConfig
    from megafp8.config.shape import LinearSpec, ModelShape, ParameterSpec

# Loaded when asked for: layers and numerics run where pydantic and PyYAML are missing.
_HOMES = {
    "load_config": "megafp8.config.cli",
    "LaunchEnvironment": "megafp8.config.environment",
    "Layout": "megafp8.config.layout",
    "RunConfig": "megafp8.config.run_config",
    "LinearSpec": "megafp8.config.shape",
    "ModelShape": "megafp8.config.shape",
    "ParameterSpec": "megafp8.config.shape",
}

__all__ = [
    "LaunchEnvironment",
    "Layout",
    "LinearSpec",
    "ModelShape",
    "ParameterSpec",
    "RunConfig",
    "load_config",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
