"""Layers of a GPT and the backend seam that makes their FP8 parts."""

from megafp8.layers.backend import Backend, CoreOptions, LayerContext, LinearOptions, NormOptions
from megafp8.layers.parameters import ParameterFactory

__all__ = [
    "Backend",
    "CoreOptions",
    "LayerContext",
    "LinearOptions",
    "NormOptions",
    "ParameterFactory",
]
