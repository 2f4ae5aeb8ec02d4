"""Streams that depend on their names alone, on every platform and in every version."""

import subprocess
import sys

import pytest
import torch

from megafp8.parallel.rng import default_generator_seeded, dropout_mask, stream_seed

CPU = torch.device("cpu")

# BLAKE2b of the parts joined by "/", 8 bytes little-endian, halved. A change of one of these would
# change initial weights and dropout masks of every run.
GOLDEN = {
    (1234,): 7608735672164080697,
    (1234, "dropout", 0, 0, 0): 867721820275703507,
    (1234, "decoder.layers.0.mlp.linear_fc1.weight", 0): 7828630544453465964,
    (0, "", "all"): 8732630856272565421,
}


@pytest.mark.parametrize("parts", GOLDEN)
def test_golden_seeds(parts):
    assert stream_seed(*parts) == GOLDEN[parts]


def test_seeds_do_not_depend_on_the_process():
    """Python's own hash of text differs from process to process."""
    code = "from megafp8.parallel.rng import stream_seed; print(stream_seed(1234, 'x', 7))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
    ).stdout
    assert answer == f"{stream_seed(1234, 'x', 7)}\n"


def test_seeds_fit_a_generator_and_differ():
    seeds = {stream_seed(seed, name, number) for seed in range(20) for name in "ab"
             for number in range(50)}  # fmt: skip
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))
    assert stream_seed(1, 23) != stream_seed(12, 3), "parts are kept apart"


def test_initial_values_are_those_of_the_stream():
    """torch's CPU generator and its normal distribution are part of a run's identity, too."""
    mask = dropout_mask(torch.Size([64]), 0.5, 42, CPU)
    generator = torch.Generator().manual_seed(42)
    assert torch.equal(mask, torch.rand(64, generator=generator) >= 0.5)
    assert mask.dtype == torch.bool


def test_default_generator_is_restored():
    before = torch.get_rng_state()
    with default_generator_seeded(5, CPU):
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(9)
    with default_generator_seeded(5, CPU):
        assert torch.equal(torch.rand(4), first)


def test_default_generator_is_restored_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(KeyError), default_generator_seeded(5, CPU):
        torch.rand(4)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
