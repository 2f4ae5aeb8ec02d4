"""Datasets of a run and the micro-batches of a data-parallel rank.

The loader keeps no position: what a rank gets is a function of (consumed samples, global batch
size), so that resuming, another number of ranks, or a ramp of the batch size need nothing stored.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megafp8.data.gpt_dataset import (
    SPLITS,
    GPTDataset,
    MockGPTDataset,
    SampleDataset,
    split_documents,
)
from megafp8.data.indexed_dataset import IndexedDataset
from megafp8.data.tokenizers import Tokenizer, build_tokenizer, resolve_vocab_size
from megafp8.errors import DataError
from megafp8.log import get_logger

MicroBatch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Datasets:
    """What a run reads.

    Attributes:
        train, valid, test: The splits; one without samples is None (training always has some).
        corpora: The files behind them, by the field of the data section that names each.
        tokenizer: None where the data section names none.
    """

    train: SampleDataset
    valid: SampleDataset | None
    test: SampleDataset | None
    corpora: dict[str, IndexedDataset] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None


def build_datasets(config: Any, tokenizer: Tokenizer | None = None) -> Datasets:
    """Open the data of a run.

    Args:
        config: A `RunConfig`; read are `data`, `model.seq_length` and `training.seed`.
        tokenizer: Already built one; else it is built where the data section names one.

    Raises:
        DataError: Data are missing, damaged, or too few for one training sample.
    """
    data = config.data
    tokenizer = tokenizer or build_tokenizer(data)
    vocab_size = resolve_vocab_size(data, tokenizer)
    if data.data_cache_path is not None:
        get_logger(__name__).info("data-cache-path has no effect: there is no index to cache")
    eod_to_mask = None
    if data.eod_mask_loss:
        if tokenizer is None:
            raise DataError("--eod-mask-loss needs --tokenizer-type, which tells the id")
        eod_to_mask = tokenizer.eod
    seq_length, seed = config.model.seq_length, config.training.seed
    if data.mock_data:
        mock = [
            MockGPTDataset(seq_length, vocab_size, seed, split=split, eod_to_mask=eod_to_mask)
            for split in SPLITS
        ]
        return Datasets(*mock, tokenizer=tokenizer)
    sources = _sources(data)
    splits = [
        None
        if source is None
        else GPTDataset(
            source[0],
            source[1],
            seq_length,
            seed,
            split=split,
            vocab_size=vocab_size,
            eod_to_mask=eod_to_mask,
        )
        for split, source in zip(SPLITS, sources, strict=True)
    ]
    train, valid, test = splits
    assert train is not None, "checked by RunConfig"
    if not train:
        raise DataError(
            f"{' '.join(data.data_path or data.train_data_path)}: {len(train.documents)} documents "
            f"with {train.num_tokens} tokens give no training sample; one needs seq-length + 1 = "
            f"{seq_length + 1} tokens"
        )
    _log_sizes(splits, seq_length)
    return Datasets(train, valid or None, test or None, _corpora(data, sources), tokenizer)


def _corpora(
    data: Any, sources: list[tuple[IndexedDataset, range] | None]
) -> dict[str, IndexedDataset]:
    fields = [f"{split}_data_path" if data.data_path is None else "data_path" for split in SPLITS]
    return {
        name: source[0] for name, source in zip(fields, sources, strict=True) if source is not None
    }


def _sources(data: Any) -> list[tuple[IndexedDataset, range] | None]:
    """Return dataset and document range of train, valid and test; sections hold one prefix each."""
    if data.data_path is not None:
        dataset = IndexedDataset(*data.data_path)
        ranges = split_documents(data.split_weights, len(dataset))
        return [(dataset, documents) for documents in ranges]
    paths = (data.train_data_path, data.valid_data_path, data.test_data_path)
    opened = [None if path is None else IndexedDataset(*path) for path in paths]
    return [None if dataset is None else (dataset, range(len(dataset))) for dataset in opened]


def _log_sizes(splits: list[GPTDataset | None], seq_length: int) -> None:
    sizes = ", ".join(
        f"{name} {len(split)} ({len(split.documents)} documents, {split.num_tokens} tokens)"
        for name, split in zip(SPLITS, splits, strict=True)
        if split is not None
    )
    get_logger(__name__).info("samples of %d tokens: %s", seq_length, sizes)


class BatchLoader:
    """The micro-batches of one data-parallel rank.

    The global batch at `consumed` is samples [consumed, consumed + global_batch_size); micro-batch
    m of rank d takes consumed + m*(micro_batch_size*dp_size) + d*micro_batch_size + [0,
    micro_batch_size). Over all ranks each sample is used exactly once, whatever the rank count.

    Args:
        dataset: Where samples come from.
        seq_length: Tokens of a sample; must be the dataset's.
        micro_batch_size: b, samples of a micro-batch.
        dp_rank: Data-parallel rank.
        dp_size: Data-parallel ranks.
        num_workers: Threads that prepare the next global batch while this one is used; 0 prepares
            each batch when it is asked for. The batches are the same.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        seq_length: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        num_workers: int = 0,
    ) -> None:
        assert dataset.seq_length == seq_length, (dataset.seq_length, seq_length)
        assert micro_batch_size >= 1 and 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._threads = (
            ThreadPoolExecutor(num_workers, thread_name_prefix="loader") if num_workers else None
        )
        self._ahead: tuple[tuple[int, int], list[Future[MicroBatch]]] | None = None

    def batch(self, consumed_samples: int, global_batch_size: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the global batch at `consumed_samples`.

        Args:
            consumed_samples: Samples used before, over all ranks.
            global_batch_size: Samples of this global batch, over all ranks.

        Returns:
            For each micro-batch `tokens` and `labels` int64 [b, s], `loss_mask` float32 [b, s],
            `position_ids` int64 [b, s]; new arrays that the caller may change.

        Raises:
            DataError: A sample is unusable.
        """
        assert consumed_samples >= 0, consumed_samples
        share = self._micro_batch_size * self._dp_size
        assert global_batch_size >= 1 and global_batch_size % share == 0, (global_batch_size, share)
        starts = self._starts(consumed_samples, global_batch_size)
        if self._threads is None:
            return [self._micro_batch(start) for start in starts]
        here, after = (consumed_samples, global_batch_size), consumed_samples + global_batch_size
        if self._ahead is not None and self._ahead[0] == here:
            futures = self._ahead[1]
        else:
            self._drop_prepared()
            futures = [self._threads.submit(self._micro_batch, start) for start in starts]
        # The next batch is a guess; a resume, an evaluation or a ramp step asks for another one.
        self._ahead = (
            (after, global_batch_size),
            [
                self._threads.submit(self._micro_batch, start)
                for start in self._starts(after, global_batch_size)
            ],
        )
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads; the loader cannot be used afterwards."""
        self._drop_prepared()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _starts(self, consumed_samples: int, global_batch_size: int) -> range:
        share = self._micro_batch_size * self._dp_size
        first = consumed_samples + self._dp_rank * self._micro_batch_size
        return range(first, first + global_batch_size, share)

    def _micro_batch(self, start: int) -> MicroBatch:
        samples = [self._dataset[start + row] for row in range(self._micro_batch_size)]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def _drop_prepared(self) -> None:
        if self._ahead is not None:
            for future in self._ahead[1]:
                future.cancel()
            self._ahead = None


def evaluation_batches(
    loader: BatchLoader, eval_iters: int, global_batch_size: int
) -> Iterator[list[MicroBatch]]:
    """Yield the batches of one evaluation.

    Each evaluation starts at sample 0 of its split, so all evaluations of a run (and of runs with
    the same data, seed and batch size) use the same eval_iters * global_batch_size samples and
    their losses compare. A split with fewer samples goes round again.
    """
    for iteration in range(eval_iters):
        yield loader.batch(iteration * global_batch_size, global_batch_size)
