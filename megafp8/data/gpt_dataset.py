"""Training samples cut from a stream of documents, and a synthetic stream for tests and benchmarks.

A split's documents are one stream of T tokens, in the order of the file; an end-of-document id is
there if preprocessing was told to append one, and nothing is added here. Sample i of an epoch is
the s + 1 tokens [i*s, i*s + s]: s inputs, and the same shifted by one as labels, so neighbours
share one token and no border is lost. There are n = (T - 1) // s of them; the (T - 1) % s tokens at
the end take no part. Sample number k, counted over epochs, is position k % n of a permutation of
(seed, epoch k // n). Nothing that grows with the number of samples is stored.

A sample may hold several documents; attention and positions run across their borders, as in
Megatron without the reset options.
"""

from collections import OrderedDict
from typing import Protocol

import numpy as np

from megafp8.data.counter_rng import derive_key, random_bits, uniform
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.permutation import Permutation
from megafp8.errors import DataError

SPLITS = ("train", "valid", "test")

Sample = dict[str, np.ndarray]


class SampleDataset(Protocol):
    """A map from sample number to sample; any number from 0 up is valid.

    Attributes:
        seq_length: Tokens of a sample.
    """

    seq_length: int

    def __len__(self) -> int:
        """Return the samples of one epoch."""
        ...

    def __getitem__(self, number: int) -> Sample:
        """Return `tokens` and `labels` int64 [s], `loss_mask` float32 [s], `position_ids` int64."""
        ...


def split_documents(
    weights: tuple[float, float, float], documents: int
) -> tuple[range, range, range]:
    """Divide documents into training, validation and test, with Megatron's rounding.

    Args:
        weights: Proportions of train, valid and test with a positive sum, such as (969, 30, 1).
        documents: Number of documents.

    Returns:
        The document ranges of train, valid and test; together they are `range(documents)`.
    """
    assert len(weights) == len(SPLITS) and min(weights) >= 0 and sum(weights) > 0, weights
    # Megatron's formula: cumulated sum of the normalised weights, rounded half to even.
    edges = [0]
    cumulated = 0.0
    for weight in (np.array(weights) / np.sum(weights)).tolist():
        cumulated += weight
        edges.append(min(documents, round(cumulated * float(documents))))
    return range(*edges[0:2]), range(*edges[1:3]), range(*edges[2:4])


class GPTDataset:
    """Samples of consecutive documents of an indexed dataset.

    Args:
        dataset: Opened `.bin`/`.idx` pair.
        documents: Consecutive documents of the split.
        seq_length: Tokens of a sample.
        seed: Decides the order.
        split: "train", "valid" or "test"; the orders of different splits are unrelated.
        vocab_size: Ids the model knows; a sample with a larger id is an error that names the
            document. None checks nothing.
        eod_to_mask: Where the input is this id the loss mask is 0 (the label is the first token of
            an unrelated document). None masks nothing.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        *,
        split: str = "train",
        vocab_size: int | None = None,
        eod_to_mask: int | None = None,
    ) -> None:
        assert documents.step == 1 and 0 <= documents.start <= documents.stop <= len(dataset)
        assert seq_length >= 1, seq_length
        self.seq_length = seq_length
        self.documents = documents
        self._dataset, self._seed = dataset, seed
        self._stream = SPLITS.index(split)
        self._vocab_size, self._eod_to_mask = vocab_size, eod_to_mask
        self._start = dataset.sequence_start(documents.start)
        self.num_tokens = dataset.sequence_start(documents.stop) - self._start
        self._samples = max(0, self.num_tokens - 1) // seq_length
        self._orders: OrderedDict[int, Permutation] = OrderedDict()

    def __len__(self) -> int:
        """Return the samples of one epoch."""
        return self._samples

    def __getitem__(self, number: int) -> Sample:
        """Return sample `number`, counted over epochs; all arrays are new.

        Raises:
            DataError: The split holds no sample, or an id does not belong to the vocabulary.
        """
        start = self._start + self.position(number) * self.seq_length
        stored = self._dataset.tokens(start, start + self.seq_length + 1)
        window = stored.astype(np.int64)
        self._check_ids(window, start)
        return make_sample(window, self._eod_to_mask)

    def position(self, number: int) -> int:
        """Return where sample `number` lies in the stream, in units of `seq_length`."""
        if self._samples == 0:
            raise DataError(
                f"{self._dataset.prefix}: {len(self.documents)} documents with {self.num_tokens} "
                f"tokens give no sample of {self.seq_length} + 1 tokens"
            )
        assert number >= 0, number
        epoch, offset = divmod(int(number), self._samples)
        order = self._orders.get(epoch)
        if order is None:
            order = Permutation(self._samples, self._seed, epoch, self._stream)
            self._orders = OrderedDict([*list(self._orders.items())[-1:], (epoch, order)])
        return order.element(offset)

    def _check_ids(self, window: np.ndarray, start: int) -> None:
        if self._vocab_size is None:
            return
        wrong = (window < 0) | (window >= self._vocab_size)
        if wrong.any():
            first = int(wrong.argmax())
            raise DataError(
                f"{self._dataset.prefix}: document {self._dataset.sequence_at(start + first)} "
                f"holds token id {window[first]}, outside the vocabulary (0.."
                f"{self._vocab_size - 1}); was it made with another tokenizer?"
            )


# The synthetic stream uses at most so many different tokens: few enough for a small model to
# learn which ones in a handful of steps.
_MOCK_STATES = 32
# From each state the chain steps to the next one, or (this often) starts anew.
_MOCK_RESTART = 0.25


class MockGPTDataset:
    """An endless synthetic stream that a small model learns quickly; no files.

    A Markov chain over S = min(32, V) states, spread evenly over the vocabulary so that every
    vocabulary shard sees some. With probability 3/4 the next state follows the present one (modulo
    S); else it is drawn anew, half of the draws going to state 0, a quarter to state 1, and so on.
    Cross-entropy therefore falls from ln V to the unigram entropy (about 2.4 nats) and on to the
    chain's own, about 0.85 nats.

    Args:
        seq_length: Tokens of a sample.
        vocab_size: V; all ids are below it.
        seed: Selects the stream.
        split: "train", "valid" or "test": the same chain, other draws.
        eod_to_mask: As in `GPTDataset`.
    """

    # Samples do not repeat; the length only has to exceed any run (2**40 samples).
    LENGTH = 1 << 40

    def __init__(
        self,
        seq_length: int,
        vocab_size: int,
        seed: int,
        *,
        split: str = "train",
        eod_to_mask: int | None = None,
    ) -> None:
        assert seq_length >= 1 and vocab_size >= 1, (seq_length, vocab_size)
        self.seq_length = seq_length
        self._seed, self._stream = seed, SPLITS.index(split)
        self._states = min(_MOCK_STATES, vocab_size)
        self._ids = np.arange(self._states, dtype=np.int64) * vocab_size // self._states
        self._eod_to_mask = eod_to_mask

    def __len__(self) -> int:
        return self.LENGTH

    def __getitem__(self, number: int) -> Sample:
        """Return sample `number`; it depends on (seed, split, number) alone."""
        key = derive_key(self._seed, self._stream, int(number))
        steps = np.arange(self.seq_length + 1)
        restart = uniform(key, 2 * steps) < _MOCK_RESTART
        restart[0] = True
        # The number of trailing zero bits of a random word is geometric: 1/2, 1/4, ...
        words = random_bits(key, 2 * steps + 1) | np.uint64(1 << 63)
        lowest = words & (~words + np.uint64(1))
        drawn = np.log2(lowest.astype(np.float64)).astype(np.int64) % self._states
        last = np.maximum.accumulate(np.where(restart, steps, 0))
        states = (drawn[last] + steps - last) % self._states
        return make_sample(self._ids[states], self._eod_to_mask)


def make_sample(window: np.ndarray, eod_to_mask: int | None = None) -> Sample:
    """Turn s + 1 consecutive tokens into inputs, labels, loss mask and positions.

    Args:
        window: int64 [s + 1]; not kept.
        eod_to_mask: Id whose positions get loss mask 0, or None.
    """
    tokens = window[:-1].copy()
    loss_mask = np.ones(tokens.size, dtype=np.float32)
    if eod_to_mask is not None:
        loss_mask[tokens == eod_to_mask] = 0.0
    return {
        "tokens": tokens,
        "labels": window[1:].copy(),
        "loss_mask": loss_mask,
        "position_ids": np.arange(tokens.size, dtype=np.int64),
    }
