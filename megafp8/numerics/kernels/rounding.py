"""Rounding inside Triton kernels, in integer arithmetic that any device and the interpreter share.

Triton's own casts are right on hardware and not in its CPU interpreter: version 3.9 truncates
fp32 -> bf16, misreads bf16 subnormals and rounds fp32 -> float8 half away from even. These
functions round before they cast, so that every cast is of a value that the target type holds.
"""

# To a type checker a kernel's arguments are what its annotations say; Triton wraps plain values.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import triton
import triton.language as tl

# Arguments are pointers, a program's tensors, or compile-time constants: to Triton no annotation
# but `tl.constexpr` means anything.


@triton.jit
def to_fp32(x: tl.tensor) -> tl.tensor:
    """Return bf16, fp16 or fp32 as fp32, exactly."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def magnitude_bits(y: tl.tensor) -> tl.tensor:
    """Return the bits of |y| as uint32. They order like the values, inf and then NaN at the top."""
    return y.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_like(y: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round fp32 to what bf16, fp16 or fp32 can hold (nearest, ties to even), still as fp32."""
    if DTYPE == tl.bfloat16:
        bits = y.to(tl.uint32, bitcast=True)
        # Half a bf16 step less one, plus the last kept bit: ties go to the even neighbour.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(y == y, rounded.to(tl.float32, bitcast=True), y)
    if DTYPE == tl.float16:
        return y.to(tl.float16).to(tl.float32)
    return y


@triton.jit
def to_codes(y: tl.tensor, E5M2: tl.constexpr) -> tl.tensor:
    """Round scaled fp32 values to FP8 codes (uint8): saturating, nearest, ties to even.

    NaN becomes 0x7F with its sign. Adding and subtracting 2**23 quanta rounds to multiples of a
    quantum, which is 2**(exponent - mantissa bits), but never below the format's subnormals.
    """
    MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    MANTISSA: tl.constexpr = 2 if E5M2 else 3
    LOWEST: tl.constexpr = 113 if E5M2 else 121  # biased exponent of the smallest normal
    sign = y.to(tl.uint32, bitcast=True) >> 31
    magnitude = magnitude_bits(y).to(tl.float32, bitcast=True)
    magnitude = tl.where(magnitude > MAX, MAX, magnitude)  # NaN is not above MAX
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, LOWEST)
    # 2**23 quanta: fp32 has no bits below one quantum there
    quanta = ((exponent + (23 - MANTISSA)) << 23).to(tl.float32, bitcast=True)
    exact = (magnitude + quanta) - quanta
    exact = tl.where(y == y, exact, 0.0)  # what a cast makes of NaN differs between devices
    code = exact.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(y == y, code, 0x7F).to(tl.uint8) | (sign.to(tl.uint8) << 7)
