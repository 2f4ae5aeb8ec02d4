"""From an amax to a scale. Every recipe's rule is here, elementwise and on the device.

    scale = (fp8_max / amax) / 2**margin        fp32 division

    amax 0, inf or NaN      delayed: the scale of before; otherwise 1.0
    scale inf (tiny amax)   largest finite fp32
    cap                     no scale above it
    power of two            mantissa bits cleared: the largest power of two that is not above

`exp2(floor(log2(scale)))` is no way to a power of two: the logarithm of a number just below one
rounds up, and the scale would saturate. MXFP8 stores the exponent of scale_inv in a byte (E8M0).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.numerics.formats import Fp8Format

_FP32_MAX = torch.finfo(torch.float32).max
_FP32_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_MANTISSA_BITS = 23
_MANTISSA = (1 << _MANTISSA_BITS) - 1
_E8M0_BIAS = 127


def round_down_to_power_of_2(scale: Tensor) -> Tensor:
    """Return the largest power of two <= `scale` (fp32, positive, normal); inf and NaN stay."""
    # Sign 0 and the exponent stay; without a mantissa a number is a power of two.
    bits = scale.view(torch.int32) & ~_MANTISSA
    return torch.where(scale.isfinite(), bits.view(torch.float32), scale)


def next_scale(
    amax: Tensor,
    scale: Tensor,
    fp8_max: Tensor | float,
    margin: int,
    power_of_2: bool = False,
    cap: float | None = None,
) -> Tensor:
    """Return `(fp8_max / amax) / 2**margin`, elementwise in fp32.

    Cases: amax 0, inf or NaN -> `scale`; a tiny amax, whose quotient is inf -> largest fp32; a
    huge amax with a margin, whose quotient is subnormal -> the smallest normal fp32, so that its
    inverse is finite.
    """
    usable = (amax > 0) & amax.isfinite()
    # torch computes number / tensor as number * (1 / tensor), which rounds twice.
    largest = fp8_max if isinstance(fp8_max, Tensor) else amax.new_full((), fp8_max)
    new = (largest / amax) / 2.0**margin
    # The quotient of a subnormal amax overflows; a finite scale still brings the tensor near
    # fp8_max.
    new = torch.where(new.isinf(), _FP32_MAX, new).clamp(min=_FP32_SMALLEST_NORMAL, max=cap)
    # Down, not to the nearest: rounding up would saturate the largest value.
    if power_of_2:
        new = round_down_to_power_of_2(new)
    return torch.where(usable, new, scale)


def current_scale(
    amax: Tensor, fmt: Fp8Format, margin: int = 0, power_of_2: bool = False
) -> Tensor:
    """Return the scale that an amax of now gives; 1.0 for 0, inf and NaN. Elementwise."""
    return next_scale(amax, torch.ones_like(amax), fmt.max, margin, power_of_2)


def e8m0_codes(amax: Tensor, fmt: Fp8Format) -> Tensor:
    """Return the E8M0 byte of scale_inv for blocks of amax: uint8, 2**(byte - 127).

    The exponent is that of amax / fp8_max rounded up, so the largest value of a block never
    saturates. It is the shared exponent of the OCP Microscaling specification 1.0 (section 6.3:
    floor(log2(amax)) - emax of the element format), plus 1 where amax lies between fp8_max and the
    next power of two, which that rule would saturate. Compared as bits, hence exact.

    Cases (Transformer Engine's `float_to_e8m0`): amax 0, and all below 2**-127 * fp8_max -> 0;
    inf -> 254; NaN -> 255.
    """
    largest = int(torch.tensor(fmt.max, dtype=torch.float32).view(torch.int32))
    # Nonnegative fp32 numbers order like their bits, so exponent and mantissa compare as integers.
    bits = amax.float().view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) - (largest >> _MANTISSA_BITS)
    rounded_up = exponent + ((bits & _MANTISSA) > (largest & _MANTISSA)).to(torch.int32)
    # 255 is NaN in E8M0, so 254 is the largest factor
    codes = (rounded_up + _E8M0_BIAS).clamp_(0, 254)
    codes = torch.where(amax.isfinite(), codes, torch.where(amax.isnan(), 255, 254))
    return codes.to(torch.uint8)


def e8m0_scales(codes: Tensor) -> Tensor:
    """Return 1 / value of E8M0 bytes, the factor before the cast, in fp32; NaN for byte 255."""
    # 1 / 2**(byte - 127) = 2**(127 - byte), whose biased exponent is 254 - byte.
    exponent = 2 * _E8M0_BIAS - codes.to(torch.int32)
    # Byte 254 is 2**127, whose inverse is subnormal: its bits are half of the smallest normal's.
    bits = torch.where(exponent > 0, exponent << _MANTISSA_BITS, 1 << (_MANTISSA_BITS - 1))
    return torch.where(codes == 255, torch.nan, bits.view(torch.float32))
