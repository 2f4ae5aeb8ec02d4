"""FP8 bytes that carry their own scales, for values that are summed after travelling.

A row (what one rank sends to another) is one run of bytes, so that one collective moves it:

    [ scale_inv, fp32, one per block | codes, one byte per value | filler up to 4 bytes ]

A block is WIRE_BLOCK neighbouring values; the last one of a row may be shorter. Its scale comes
from its own amax, hence nothing saturates:

    amax finite    as in current scaling (`current_scale`)
    amax inf, NaN  scale 0, scale_inv 1: what is not finite becomes NaN, the rest of the block 0.
                   A fault must be seen by whoever looks at the sum, never saturated away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.config.wire import SCALE_BYTES, WIRE_BLOCK, payload_bytes, wire_blocks
from megafp8.numerics.formats import Fp8Format
from megafp8.numerics.quantize import decode
from megafp8.numerics.scales import current_scale

_CHUNK = 1 << 18  # elements that stay in a CPU's cache; see `quantize`


def encode_rows(x: Tensor, fmt: Fp8Format) -> Tensor:
    """Cast rows of values to rows of bytes.

    Args:
        x: bf16, fp16 or fp32 [rows, n]; never written to.
        fmt: format of the codes.

    Returns:
        uint8 [rows, payload_bytes(n)].
    """
    rows, length = x.shape
    payload = torch.zeros(rows, payload_bytes(length), dtype=torch.uint8, device=x.device)
    if length == 0:
        return payload
    scale_inv, codes = _parts(payload, length, fmt)
    # First all whole blocks at once, then the shorter one at the end, if there is one.
    whole = length // WIRE_BLOCK * WIRE_BLOCK
    for first, last, size in ((0, whole, WIRE_BLOCK), (whole, length, length - whole)):
        if first == last:
            continue
        source = x[:, first:last].unflatten(1, (-1, size))  # [rows, blocks, size]
        target = codes[:, first:last].unflatten(1, (-1, size))
        factors = scale_inv[:, first // WIRE_BLOCK : wire_blocks(last)]  # [rows, blocks]
        if x.device.type != "cpu":
            _cast(source, fmt, target, factors)
            continue
        step = max(_CHUNK // size, 1)  # blocks whose values stay in cache
        for row in range(rows):
            pieces = (t[row].split(step) for t in (source, target, factors))
            for piece_source, piece_target, piece_factors in zip(*pieces, strict=True):
                _cast(piece_source, fmt, piece_target, piece_factors)
    return payload


def _parts(payload: Tensor, length: int, fmt: Fp8Format) -> tuple[Tensor, Tensor]:
    """Views (scale_inv fp32 [rows, blocks], codes [rows, n]) of rows of bytes."""
    head = SCALE_BYTES * wire_blocks(length)
    codes = payload[:, head : head + length].view(fmt.dtype)
    return payload[:, :head].view(torch.float32), codes


def _cast(x: Tensor, fmt: Fp8Format, codes: Tensor, scale_inv: Tensor) -> None:
    """[..., size] values into codes and [...] factors."""
    values = x.to(torch.float32, copy=True)
    amax = values.abs().amax(-1)
    # inf * 0 and NaN * 0 are NaN, the rest of the block becomes 0: the receiver sees the fault.
    scale = torch.where(amax.isfinite(), current_scale(amax, fmt), 0.0)
    scale_inv.copy_(torch.where(scale > 0, scale.reciprocal(), 1.0))
    codes.copy_(values.mul_(scale.unsqueeze(-1)).clamp_(-fmt.max, fmt.max))


def decode_row(payload: Tensor, length: int, fmt: Fp8Format) -> Tensor:
    """Return the fp32 values [n] of one row of bytes."""
    if length == 0:
        return torch.zeros(0, dtype=torch.float32, device=payload.device)
    scale_inv, codes = _parts(payload[None], length, fmt)
    values = decode(codes[0], torch.float32)
    whole = length // WIRE_BLOCK * WIRE_BLOCK
    # [blocks, WIRE_BLOCK] * [blocks, 1]
    values[:whole].view(-1, WIRE_BLOCK).mul_(scale_inv[0, : whole // WIRE_BLOCK].unsqueeze(-1))
    if whole < length:
        values[whole:].mul_(scale_inv[0, -1])
    return values


def sum_rows(payload: Tensor, own: Tensor, rank: int, fmt: Fp8Format) -> Tensor:
    """Sum what all ranks sent to this one, in rank order, in fp32.

    The order is fixed, so the bits do not depend on when anything arrived.

    Args:
        payload: uint8 [ranks, payload_bytes(n)], row r from rank r.
        own: [n], this rank's own values, which did not travel and are added uncast.
        rank: this rank's place.
        fmt: format of the codes.

    Returns:
        fp32 [n].
    """
    # One row is decoded at a time: memory is that of one, however many ranks there are.
    total = torch.zeros(own.numel(), dtype=torch.float32, device=own.device)
    for source, row in enumerate(payload.unbind()):
        total += own if source == rank else decode_row(row, own.numel(), fmt)
    return total
