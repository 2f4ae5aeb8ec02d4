"""A shuffle without a shuffled array: any position of a random permutation, computed on its own.

A stored shuffle needs memory in proportion to the number of samples, on every rank, and has to be
rebuilt or read at each start. Here the sample at a position is a function of (position, size, seed,
epoch): the order is fixed by the configuration and the data position alone.

The construction is a Feistel network over Z_a x Z_b with a*b >= size and modular addition in place
of xor (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). a = ceil(sqrt(size)) and
b = ceil(size/a) leave at most a - 1 surplus elements; a position that lands on one is encrypted
again until it falls below size (cycle walking), which keeps the map a bijection.
"""

import math
from collections.abc import Callable

import numpy as np

from megafp8.data.counter_rng import derive_key, random_bits, random_bits_of

# Four rounds are pseudo-random for large domains; small ones (a few elements) need more to reach
# all permutations with about equal frequency.
ROUNDS = 12


class Permutation:
    """A random bijection of {0, ..., size - 1}; memory does not depend on `size`.

    Args:
        size: Number of elements, at least 1.
        seed: Selects the family.
        epoch: Selects the permutation; different epochs are unrelated.
        stream: Keeps uses of the same seed apart, such as the training and validation split.
    """

    def __init__(self, size: int, seed: int, epoch: int = 0, stream: int = 0) -> None:
        assert size >= 1, size
        self.size = size
        self._left = math.isqrt(size - 1) + 1
        self._right = -(-size // self._left)
        self._keys = [derive_key(seed, stream, epoch, number) for number in range(ROUNDS)]

    def __call__(self, positions: np.ndarray | int) -> np.ndarray:
        """Return the elements at `positions` (int64, the shape of `positions`)."""
        return self._walk(positions, self._encrypt)

    def element(self, position: int) -> int:
        """Return the element at one position, as `__call__` does, without arrays."""
        if not 0 <= position < self.size:
            raise IndexError(f"position outside [0, {self.size})")
        value = position
        while True:
            left, right = divmod(value, self._right)
            for number, key in enumerate(self._keys):
                if number % 2:
                    right = (right + random_bits_of(key, left) % self._right) % self._right
                else:
                    left = (left + random_bits_of(key, right) % self._left) % self._left
            value = left * self._right + right
            if value < self.size:
                return value

    def inverse(self, elements: np.ndarray | int) -> np.ndarray:
        """Return the positions of `elements` (int64, the shape of `elements`)."""
        return self._walk(elements, self._decrypt)

    def _walk(
        self, values: np.ndarray | int, step: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        start = np.asarray(values, dtype=np.int64)
        result = start.reshape(-1)
        if result.size and not (0 <= result.min() and result.max() < self.size):
            raise IndexError(f"position outside [0, {self.size})")
        result = step(result)
        outside = result >= self.size
        while outside.any():
            result[outside] = step(result[outside])
            outside = result >= self.size
        return result.reshape(start.shape)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, self._right)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + self._round(key, left, self._right)) % self._right
            else:
                left = (left + self._round(key, right, self._left)) % self._left
        return left * self._right + right

    def _decrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, self._right)
        for number, key in reversed(list(enumerate(self._keys))):
            if number % 2:
                right = (right - self._round(key, left, self._right)) % self._right
            else:
                left = (left - self._round(key, right, self._left)) % self._left
        return left * self._right + right

    @staticmethod
    def _round(key: int, half: np.ndarray, modulus: int) -> np.ndarray:
        return (random_bits(key, half) % np.uint64(modulus)).astype(np.int64)
