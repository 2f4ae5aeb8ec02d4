"""The unit of FP8 traffic, for what computes it and what reckons with it; needs no pydantic."""

# Values that share a scale where FP8 is summed after travelling (activations, gradients): 4 bytes
# per 256 codes, 0.508 of BF16 and 0.254 of FP32.
WIRE_BLOCK = 256
SCALE_BYTES = 4  # of an fp32 scale_inv


def wire_blocks(length: int) -> int:
    """Return how many scales a row of `length` values has."""
    return -(-length // WIRE_BLOCK)


def payload_bytes(length: int) -> int:
    """Return the bytes of a row of `length` values: scales and codes, filled up to a scale."""
    return -(-(SCALE_BYTES * wire_blocks(length) + length) // SCALE_BYTES) * SCALE_BYTES
