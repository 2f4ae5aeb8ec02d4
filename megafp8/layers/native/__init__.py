"""The native backend: FP8 linears and norms in plain torch, on any device."""

from megafp8.layers.native.backend import NativeBackend

__all__ = ["NativeBackend"]
