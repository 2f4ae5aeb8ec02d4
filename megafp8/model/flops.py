"""Floating-point operations of a training step, by the standard count of matrix products."""

from megafp8.config import ModelShape


def training_flops_per_token(shape: ModelShape) -> float:
    """Operations per token of forward and backward, without recompute.

    Each weight of a matrix product costs 2 operations forward and 4 backward; attention adds
    2 products of s x d per head, halved by causality (Megatron's and PaLM's count, arXiv:2204.02311
    appendix B, with the causal half counted). Embedding look-ups cost nothing; the vocabulary
    projection counts with its padded width.
    """
    h, d = shape.hidden_size, shape.head_dim
    fc1 = shape.ffn_size * (2 if shape.swiglu else 1)
    weights = shape.num_layers * (
        h * shape.qkv_size + shape.attention_size * h + h * fc1 + shape.ffn_size * h
    )
    weights += h * shape.padded_vocab_size
    attention = shape.num_layers * 2 * shape.num_heads * d * shape.seq_length / 2
    return 6.0 * (weights + attention)


# Dense peak of one device in TFLOP/s by torch's device name (NVIDIA's data sheets, no sparsity).
PEAK_TFLOPS = {
    "H100": {"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0},
    "H200": {"bf16": 989.0, "fp16": 989.0, "fp8": 1979.0},
    "A100": {"bf16": 312.0, "fp16": 312.0},
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
}


def peak_tflops(device_name: str, precision: str) -> float | None:
    """Peak of the device in TFLOP/s, or None where it is not known (a CPU, say)."""
    for key, peaks in PEAK_TFLOPS.items():
        if key in device_name:
            return peaks.get(precision)
    return None
