"""The two 8-bit floating-point formats of FP8 training.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433. E4M3 is the "fn"
variant: no infinities, one NaN code per sign (0x7F, 0xFF). E5M2 follows IEEE 754.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fp8Format:
    """What one FP8 format can hold.

    `max_code` is the byte of `max`; with the sign bit cleared, every larger byte is inf or NaN.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    max_code: int

    @property
    def bias(self) -> int:
        """Exponent bias: 7 for E4M3, 15 for E5M2."""
        # As in IEEE 754: half of the exponents are below 2**0.
        return (1 << (self.exponent_bits - 1)) - 1

    def __repr__(self) -> str:
        return f"Fp8Format({self.name})"


# E4M3 gives up inf for one more binade: 0x7E is 448, not 240.
E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, 4, 3, 448.0, 2.0**-6, 2.0**-9, 0x7E)
# Above 0x7B come inf (0x7C) and NaNs.
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, 5, 2, 57344.0, 2.0**-14, 2.0**-16, 0x7B)
