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

from megafp8.data.counter_rng import derive_key, random_bits_of

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

    def element(self, position: int) -> int:
        """Return the element at `position`.

        Raises:
            IndexError: It is not one of the permutation's.
        """
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
