"""What a cast did to a tensor. Counts and sums first, so that ranks can add them; ratios last.

    zeros       exact zeros among the inputs, of either sign, in percent of all elements
    underflow   nonzero inputs that became +-0, in percent of all elements
    saturation  |x| > fp8_max * scale_inv, in percent of all elements
    nonfinite   inf and NaN inputs, a count
    mse         mean of (dq(x) - x)**2      } over the finite inputs
    sqnr_db     20 log10(|x| / |x - dq(x)|) }
    cosine      cos(x, dq(x))               }

A percentage over several ranks is the quotient of summed counts, never a mean of percentages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafp8.numerics.formats import Fp8Format
from megafp8.numerics.quantize import QuantizedTensor, decode
from megafp8.numerics.scales import current_scale

# Order of the vector that `count` returns.
COUNTS = (
    "elements",
    "zeros",
    "underflow",
    "saturation",
    "nonfinite",
    "error_squares",
    "input_squares",
    "output_squares",
    "products",
)


def count(x: Tensor, quantized: QuantizedTensor) -> Tensor:
    """Return the float64 vector `COUNTS` for a tensor and its cast, without a host sync.

    Args:
        x: what was cast, any shape and strides, pads excluded.
        quantized: its cast; `scale_inv` is the one it was cast with.
    """
    x = x.detach().float()
    scale_inv = quantized.spread_scale_inv()
    values = decode(quantized.data, torch.float32)
    finite = x.isfinite()
    # An inf would swallow every sum; it is counted, and left out of the errors.
    clean = torch.where(finite, x, 0.0)
    dequantized = torch.where(finite, values * scale_inv, 0.0)
    error = dequantized - clean
    elements = torch.tensor(x.numel(), dtype=torch.float64, device=x.device)
    terms = (
        x == 0,
        (x != 0) & (values == 0),
        # Of inputs, not of codes equal to the maximum: rounding reaches that code, too.
        x.abs() > quantized.format.max * scale_inv,
        ~finite,
        # fp64: squares of fp32 values may leave fp32, and sums of millions lose bits.
        error.double().square(),
        clean.double().square(),
        dequantized.double().square(),
        clean.double() * dequantized.double(),
    )
    return torch.stack([elements, *(term.sum(dtype=torch.float64) for term in terms)])


def summarize(counts: Tensor) -> dict[str, float | None]:
    """Turn counts, summed over whatever ranks and micro-batches, into statistics.

    None stands for undefined: every ratio of an empty tensor, and `sqnr_db` and `cosine` of a zero
    one. An exact cast has `sqnr_db` inf.
    """
    c = dict(zip(COUNTS, counts.tolist(), strict=True))
    elements, finite = c["elements"], c["elements"] - c["nonfinite"]
    sqnr_db, cosine = _closeness(
        c["error_squares"], c["input_squares"], c["output_squares"], c["products"]
    )
    return {
        "zeros": 100 * c["zeros"] / elements if elements else None,
        "underflow": 100 * c["underflow"] / elements if elements else None,
        "saturation": 100 * c["saturation"] / elements if elements else None,
        "nonfinite": c["nonfinite"],
        "mse": c["error_squares"] / finite if finite else None,
        "sqnr_db": sqnr_db,
        "cosine": cosine,
    }


def closeness(found: Tensor, wanted: Tensor) -> tuple[float | None, float | None]:
    """Return (`sqnr_db`, `cosine`) of a tensor against what it should be; syncs.

    Args:
        found: any shape and floating dtype, such as a weight gradient of FP8 GEMMs.
        wanted: same shape, such as that gradient of BF16 GEMMs.

    Returns:
        None for what is undefined: both if `wanted` is zero, the cosine if `found` is. NaN if
        either tensor holds an inf or NaN.
    """
    x, y = wanted.detach().double(), found.detach().double()
    # One wait for the device, for all four sums.
    sums = torch.stack([term.sum() for term in ((y - x).square(), x * x, y * y, x * y)]).tolist()
    return _closeness(*sums) if math.isfinite(sum(sums)) else (math.nan, math.nan)


def _closeness(
    error_squares: float, input_squares: float, output_squares: float, products: float
) -> tuple[float | None, float | None]:
    """(sqnr_db, cosine) of finite sums."""
    sqnr_db = cosine = None
    if input_squares > 0:
        # An exact cast has no noise: its SQNR is inf, not an error.
        noise = math.log10(error_squares) if error_squares > 0 else -math.inf
        sqnr_db = 10 * (math.log10(input_squares) - noise)
    # Two roots, since the product of the squares may overflow; rounding may leave [-1, 1].
    norms = math.sqrt(input_squares) * math.sqrt(output_squares)
    if norms > 0:
        cosine = max(-1.0, min(1.0, products / norms))
    return sqnr_db, cosine


def scale_log2_drift(scale: Tensor, amax: Tensor, fmt: Fp8Format, margin: int = 0) -> Tensor:
    """Return log2(delayed scale / current scale); positive: the delayed one saturates."""
    return torch.log2(scale / current_scale(amax, fmt, margin))
