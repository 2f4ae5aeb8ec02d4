"""Random numbers that are a function of a key and a counter, with no state to save.

The hash is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection on 64
bits whose output passes BigCrush when fed with counters spaced by an odd constant.
"""

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """Return a 64-bit key for a tuple of integers, such as (seed, epoch)."""
    key = 0
    for part in parts:
        key = _mix_int((key + _GOLDEN + _mix_int((part + _GOLDEN) & _MASK)) & _MASK)
    return key


def random_bits_of(key: int, counter: int) -> int:
    """Return `random_bits` of one counter; in plain integers, ten times faster than an array."""
    return _mix_int((counter * _GOLDEN + key) & _MASK)


def random_bits(key: int, counters: np.ndarray) -> np.ndarray:
    """Return 64 random bits for each counter.

    Args:
        key: From `derive_key`.
        counters: Non-negative, any shape.

    Returns:
        uint64, the shape of `counters`.
    """
    # Arrays wrap modulo 2**64 silently; NumPy scalars would warn.
    value = np.atleast_1d(counters).astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    value ^= value >> np.uint64(30)
    value *= np.uint64(_MIX_1)
    value ^= value >> np.uint64(27)
    value *= np.uint64(_MIX_2)
    value ^= value >> np.uint64(31)
    return value.reshape(np.shape(counters))


def uniform(key: int, counters: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) for each counter, float64 with 53 random bits."""
    return (random_bits(key, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
