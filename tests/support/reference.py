"""Slow exact references, in NumPy and float64, sharing no code with the casts they check.

A format's values follow from its bit layout; rounding picks the nearest of these values, in
float64, where all of them and all midpoints between two of them are exact.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megafp8.numerics.formats import Fp8Format

_FP32_MAX = float(np.finfo(np.float32).max)


def code_value(code: int, fmt: Fp8Format) -> float:
    """Return the value of one byte, from its sign, exponent and mantissa bits."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code & 0x7F) >> fmt.mantissa_bits
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    # E4M3 has no inf, and one NaN a sign; E5M2 has both, as IEEE formats do.
    if code & 0x7F > fmt.max_code:
        ieee_inf = fmt.name == "e5m2" and mantissa == 0
        return sign * math.inf if ieee_inf else math.nan
    fraction = mantissa / (1 << fmt.mantissa_bits)  # subnormals lack the implicit 1
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - fmt.bias)
    return sign * (1.0 + fraction) * 2.0 ** (exponent - fmt.bias)


def code_values(fmt: Fp8Format) -> NDArray[np.float64]:
    """Return the values of all 256 bytes."""
    return np.array([code_value(code, fmt) for code in range(256)])


def encode(y: NDArray[np.float32], fmt: Fp8Format) -> NDArray[np.uint8]:
    """Round scaled values to codes: nearest, ties to the even code, saturating; NaN is 0x7F."""
    # nonnegative finite values, ascending as their codes are
    values = code_values(fmt)[: fmt.max_code + 1]
    midpoints = (values[:-1] + values[1:]) / 2
    magnitude = np.abs(y.astype(np.float64))
    code = np.searchsorted(midpoints, magnitude, side="left")  # ties: the lower neighbour
    tie = np.append(midpoints, np.inf)[code] == magnitude
    # A tie went to the lower neighbour; where that code is odd, the even one is above.
    code = code + (tie & (code % 2 == 1) & (code < fmt.max_code))
    code = np.where(np.isnan(y), 0x7F, code)
    return (code + 0x80 * np.signbit(y)).astype(np.uint8)


def quantize(x: NDArray[np.float32], scale: float, fmt: Fp8Format) -> NDArray[np.uint8]:
    """Return the codes of `x * scale`; the product is rounded to fp32 once."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        return encode(x * np.float32(scale), fmt)


def scale_of(amax: float, fmt: Fp8Format, power_of_2: bool) -> float:
    """Return the scale of a block: fp8_max / amax in fp32; 1.0 for amax 0, inf and NaN."""
    if not 0.0 < amax < math.inf:
        return 1.0
    with np.errstate(over="ignore"):
        scale = min(float(np.float32(fmt.max) / np.float32(amax)), _FP32_MAX)
    return _power_below(scale) if power_of_2 else scale


def _power_below(scale: float) -> float:
    return math.ldexp(1.0, math.frexp(scale)[1] - 1)


def e8m0(amax: float, fmt: Fp8Format) -> int:
    """Return the byte of the smallest power of two 2**(byte - 127) with amax / it <= fp8_max.

    0 for amax 0, 254 for inf, 255 for NaN.
    """
    if math.isnan(amax):
        return 255
    # largest amax that each byte holds unsaturated
    largest = [math.ldexp(fmt.max, byte - 127) for byte in range(255)]
    return min(bisect_left(largest, amax), 254)


def quantize_blocks(
    x: NDArray[np.float32], block: tuple[int, int], fmt: Fp8Format, mx: bool, power_of_2: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Return codes and elementwise scale_inv of x [m, k], block by block; 0 is a whole dimension.

    Blocks at the edges are what is left. Scales are E8M0 with `mx`, else fp32.
    """
    codes = np.zeros(x.shape, np.uint8)
    scale_inv = np.zeros(x.shape, np.float64)
    r, c = block[0] or x.shape[0], block[1] or x.shape[1]
    for i in range(0, x.shape[0], r):
        for j in range(0, x.shape[1], c):
            here = np.s_[i : i + r, j : j + c]
            amax = float(np.abs(x[here]).max())
            if mx:
                byte = e8m0(amax, fmt)
                inverse = math.nan if byte == 255 else math.ldexp(1.0, byte - 127)
                scale = 1 / inverse
            else:
                scale = scale_of(amax, fmt, power_of_2)
                inverse = float(np.float32(1) / np.float32(scale))
            codes[here], scale_inv[here] = quantize(x[here], scale, fmt), inverse
    return codes, scale_inv


def scaled_gemm(
    a: NDArray[np.uint8],
    a_scale_inv: NDArray[np.float64],
    a_format: Fp8Format,
    b: NDArray[np.uint8],
    b_scale_inv: NDArray[np.float64],
    b_format: Fp8Format,
) -> NDArray[np.float64]:
    """Return a [m, k] @ b [k, n] in float64, each element times its own scale_inv."""
    return (code_values(a_format)[a] * a_scale_inv) @ (code_values(b_format)[b] * b_scale_inv)


def gemm(
    a: NDArray[np.uint8],
    a_format: Fp8Format,
    b: NDArray[np.uint8],
    b_format: Fp8Format,
    scale_inv: float,
) -> NDArray[np.float64]:
    """Return a [m, k] @ b [k, n] * scale_inv in float64.

    E4M3 products are multiples of 2**-18 below 2**18: exact up to k = 2**17. E5M2 x E4M3 are
    multiples of 2**-25 below 2**25: exact while partial sums stay below 2**28.
    """
    return code_values(a_format)[a] @ code_values(b_format)[b] * scale_inv


def to_bfloat16_grid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round float64 to bf16 precision once (8 significant bits, ties to even; no subnormals)."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa * 256.0) / 256.0, exponent)


class DelayedScaling:
    """One tensor's scale and window, in plain Python; the rule of `registry`, written again."""

    def __init__(
        self,
        fmt: Fp8Format,
        length: int,
        margin: int = 0,
        skip: bool = True,
        power_of_2_scales: bool = False,
        scale_cap: float | None = None,
    ) -> None:
        self.fp8_max, self.length, self.margin, self.skip = fmt.max, length, margin, skip
        self.power_of_2, self.cap = power_of_2_scales, scale_cap
        self.scale = np.float32(1.0)
        self.window: list[float] = []

    def update(self, amaxes: Sequence[float]) -> None:
        """Take one step's amaxes (micro-batches, ranks) and choose the next scale by `max`."""
        amax = 0.0
        for value in amaxes:
            if math.isnan(value):
                value = math.inf if self.skip else 0.0
            amax = max(amax, value)
        # An entry a step; a step without values, or with an inf under `skip`, makes none.
        if amax > 0.0 and not (self.skip and math.isinf(amax)):
            self.window = [*self.window, amax][-self.length :]
        chosen = max(self.window, default=0.0)
        if chosen == 0.0 or math.isinf(chosen):
            return
        with np.errstate(over="ignore"):
            scale = np.float32(self.fp8_max) / np.float32(chosen) / np.float32(2.0**self.margin)
        scale = np.float32(min(float(scale), self.cap or _FP32_MAX, _FP32_MAX))
        self.scale = np.float32(_power_below(float(scale))) if self.power_of_2 else scale
