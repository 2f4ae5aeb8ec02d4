"""The operation count by hand for one small model."""

import pytest

from megafp8.config import ModelShape
from megafp8.model.flops import peak_tflops, training_flops_per_token
from tests.model.small import GPT2, LLAMA, small_config


def test_count_by_hand():
    # Per layer: qkv 32 x 64, proj 32 x 32, fc1 32 x 128 (gate and up), fc2 64 x 32; head 32 x 128.
    # Scores and their product with the values: 2 x 32 channels x 16 keys, half of them visible.
    weights = 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32) + 32 * 128
    scores = 2 * 2 * 32 * 16 / 2
    shape = ModelShape.from_config(small_config(LLAMA), 100)
    assert training_flops_per_token(shape) == 6 * (weights + scores)


def test_gelu_has_one_half_of_fc1():
    gelu = training_flops_per_token(ModelShape.from_config(small_config(GPT2), 100))
    weights = 2 * (32 * 96 + 32 * 32 + 32 * 64 + 64 * 32) + 32 * 128
    assert gelu == 6 * (weights + 2 * 2 * 32 * 16 / 2)


@pytest.mark.parametrize(
    "device, precision, wanted",
    [
        ("NVIDIA H200", "fp8", 1979.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("cpu", "bf16", None),
    ],
)
def test_peaks(device, precision, wanted):
    assert peak_tflops(device, precision) == wanted
