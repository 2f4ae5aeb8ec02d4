"""megafp8: FP8 training of GPT models with Megatron's interface on PyTorch's distributed engine."""

__version__ = "0.1.0"
