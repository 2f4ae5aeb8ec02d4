"""The computed shuffle: a bijection for every size, unrelated between epochs, well mixed."""

import numpy as np
import pytest

from megafp8.data.counter_rng import derive_key, random_bits, uniform
from megafp8.data.permutation import Permutation


def elements_of(order: Permutation, positions) -> np.ndarray:
    """The elements at `positions`."""
    return np.array([order.element(int(position)) for position in positions])


SIZES = [*range(1, 35), 63, 64, 65, 99, 100, 101, 127, 128, 129, 1000, 4095, 4096, 4097, 65537]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_a_bijection(size):
    for seed, epoch in ((1234, 0), (1234, 1), (0, 0)):
        order = Permutation(size, seed, epoch)
        elements = elements_of(order, range(size))
        assert np.array_equal(np.sort(elements), np.arange(size))


@pytest.mark.parametrize("size", [2**31 - 1, 2**40, 2**40 + 1, 10**15 + 37, 2**60])
def test_large_sizes_repeat_nothing(size):
    order = Permutation(size, seed=5)
    rng = np.random.default_rng(0)
    spots = {0, 1, size - 2, size - 1, *rng.integers(0, size, 2000).tolist()}
    elements = elements_of(order, spots)
    assert elements.min() >= 0 and elements.max() < size
    assert len(set(elements.tolist())) == len(spots)
    # Uniform over the whole range: the mean of 2000 draws is within 5 standard errors.
    assert abs(elements.mean() / size - 0.5) < 5 * np.sqrt(1 / 12 / 2000)


def test_values_are_fixed_for_ever():
    """A change of these numbers changes what every resumed run trains on."""
    assert elements_of(Permutation(10, seed=1234, epoch=0), range(10)).tolist() == [
        4,
        7,
        2,
        0,
        5,
        6,
        8,
        1,
        9,
        3,
    ]
    assert elements_of(Permutation(10**6, seed=1234, epoch=3), range(4)).tolist() == [
        106666,
        460348,
        165569,
        908468,
    ]


def test_seed_epoch_and_stream_select_unrelated_orders():
    base = elements_of(Permutation(5000, 1, 0, 0), range(5000))
    for other in (Permutation(5000, 2, 0), Permutation(5000, 1, 1), Permutation(5000, 1, 0, 1)):
        # Two unrelated permutations agree in one place on average (Poisson: P(> 8) = 1e-6).
        assert (elements_of(other, range(5000)) == base).sum() <= 8


@pytest.mark.parametrize("size", [2, 3, 5, 7, 12])
def test_small_orders_are_balanced(size):
    """Each element comes at each position about equally often over many epochs."""
    draws = 3000
    counts = np.zeros((size, size))
    for epoch in range(draws):
        counts[np.arange(size), elements_of(Permutation(size, 99, epoch), range(size))] += 1
    expected = draws / size
    # 5.5 standard deviations of a binomial count
    assert np.abs(counts - expected).max() < 5.5 * np.sqrt(expected * (1 - 1 / size))


def test_all_orders_of_three_occur():
    found = {
        tuple(elements_of(Permutation(3, 7, epoch), range(3)).tolist()) for epoch in range(300)
    }
    assert len(found) == 6


def test_neighbours_are_torn_apart():
    elements = elements_of(Permutation(100_003, seed=11), range(100_003))
    steps = np.diff(elements)
    # For a random order the mean distance is a third of the size, and few neighbours stay so.
    assert abs(np.abs(steps).mean() / 100_003 - 1 / 3) < 0.01
    assert (steps == 1).sum() <= 10
    correlation = np.corrcoef(np.arange(elements.size), elements)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(elements.size)


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position):
    with pytest.raises(IndexError, match=r"outside \[0, 10\)"):
        Permutation(10, 0).element(position)


def test_the_hash_is_splitmix64():
    # First outputs of splitmix64 from seed 0 (reference implementation by Vigna).
    golden = 0x9E3779B97F4A7C15
    assert [hex(value) for value in random_bits(golden, np.arange(3)).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_keys_depend_on_every_part_and_on_their_order():
    keys = {derive_key(*parts) for parts in [(1, 2), (2, 1), (1,), (1, 2, 0), (0, 1, 2), (-1, 2)]}
    assert len(keys) == 6


def test_uniform_numbers_are_uniform():
    numbers = uniform(derive_key(1), np.arange(100_000))
    assert 0 <= numbers.min() and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.abs(counts - 5000).max() < 5.5 * np.sqrt(5000)
