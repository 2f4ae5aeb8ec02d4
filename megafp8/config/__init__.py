"""Configuration: frozen models, command line and YAML, checks, sizes. Imports no torch."""

from megafp8.config.cli import load_config
from megafp8.config.environment import LaunchEnvironment
from megafp8.config.layout import Layout
from megafp8.config.run import RunConfig
from megafp8.config.shape import LinearSpec, ModelShape, ParameterSpec

__all__ = [
    "LaunchEnvironment",
    "Layout",
    "LinearSpec",
    "ModelShape",
    "ParameterSpec",
    "RunConfig",
    "load_config",
]
