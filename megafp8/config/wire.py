"""The unit of FP8 traffic, for what computes it and what reckons with it; needs no pydantic."""

# Values that share a scale where FP8 is summed after travelling (activations, gradients).
WIRE_BLOCK = 256
