"""Layers of NVIDIA's TransformerEngine (TE), the only package that imports it.

Importing this package imports no TE: `available` says whether it can be used, `make_backend` does.
"""

from megafp8.layers.transformer_engine.availability import (
    available,
    environment,
    select_core,
    version,
)

__all__ = ["available", "environment", "select_core", "version"]
