"""Fused quantization in Triton; `choice` says whether it is used, and needs no Triton itself.

`cast` and `fused` import Triton: import them where a `KernelChoice` says "triton".
"""

from megafp8.numerics.kernels.choice import EAGER, KERNELS, KernelChoice, choose_kernels

__all__ = ["EAGER", "KERNELS", "KernelChoice", "choose_kernels"]
