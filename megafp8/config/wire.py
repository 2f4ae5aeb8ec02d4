"""The unit of FP8 traffic, for what computes it and what reckons with it; needs no pydantic."""

# Values that share a scale where FP8 is summed after travelling (activations, gradients).
WIRE_BLOCK = 256
SCALE_BYTES = 4


def blocks(length: int) -> int:
    """Return the blocks of `length` values; the last may be shorter."""
    return -(-length // WIRE_BLOCK)


def payload_bytes(length: int) -> int:
    """Return the bytes of `length` values with a scale per block; a multiple of 4."""
    return -(-(SCALE_BYTES * blocks(length) + length) // SCALE_BYTES) * SCALE_BYTES
