"""Batches: a function of the data position alone, the same for any layout and worker count."""

from types import SimpleNamespace

import numpy as np
import pytest

from megafp8.config.data import DataConfig
from megafp8.data.gpt_dataset import GPTDataset, MockGPTDataset
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megafp8.data.loader import BatchLoader, build_datasets, evaluation_batches
from megafp8.data.tokenizers import NullTokenizer
from megafp8.errors import DataError
from tests.support.corpora import add_document


class Numbers:
    """A dataset whose tokens are the sample's own number, so batches show what they hold."""

    seq_length = 4

    def __len__(self):
        return 10

    def __getitem__(self, number):
        tokens = np.full(4, number, dtype=np.int64)
        return {"tokens": tokens, "loss_mask": np.ones(4, dtype=np.float32)}


def numbers(loader, consumed, global_batch_size):
    return [batch["tokens"][:, 0].tolist() for batch in loader.batch(consumed, global_batch_size)]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batch_order_is_the_written_one(num_workers):
    ranks = [BatchLoader(Numbers(), 4, 2, rank, 3, num_workers=num_workers) for rank in range(3)]
    assert [numbers(loader, 100, 12) for loader in ranks] == [
        [[100, 101], [106, 107]],
        [[102, 103], [108, 109]],
        [[104, 105], [110, 111]],
    ]
    for loader in ranks:
        loader.close()


@pytest.mark.parametrize(
    ("micro_batch_size", "dp_size"), [(1, 1), (2, 1), (1, 4), (2, 4), (4, 2), (8, 1)]
)
def test_every_layout_uses_each_sample_once(micro_batch_size, dp_size):
    seen = []
    for rank in range(dp_size):
        loader = BatchLoader(Numbers(), 4, micro_batch_size, rank, dp_size)
        seen += [number for batch in numbers(loader, 16, 8) for number in batch]
    assert sorted(seen) == list(range(16, 24))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_give_the_same_batches_in_any_sequence_of_requests(num_workers):
    inline = BatchLoader(MockGPTDataset(8, 100, 1), 8, 2, 1, 2)
    ahead = BatchLoader(MockGPTDataset(8, 100, 1), 8, 2, 1, 2, num_workers=num_workers)
    # Consecutive batches, a resume backwards, a ramp of the batch size, an evaluation in between.
    for position, size in [(0, 8), (8, 8), (16, 8), (8, 8), (16, 16), (32, 4), (0, 4), (36, 4)]:
        for one, other in zip(
            inline.batch(position, size), ahead.batch(position, size), strict=True
        ):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)
    ahead.close()


def test_micro_batches_have_the_agreed_types():
    [batch] = BatchLoader(MockGPTDataset(8, 100, 1), 8, 2).batch(0, 2)
    assert {name: (array.dtype.name, array.shape) for name, array in batch.items()} == {
        "tokens": ("int64", (2, 8)),
        "labels": ("int64", (2, 8)),
        "loss_mask": ("float32", (2, 8)),
        "position_ids": ("int64", (2, 8)),
    }


def test_changing_a_batch_changes_no_other():
    loader = BatchLoader(MockGPTDataset(8, 100, 1), 8, 2, num_workers=1)
    before = {name: array.copy() for name, array in loader.batch(0, 2)[0].items()}
    for array in loader.batch(0, 2)[0].values():
        array[:] = 0
    again = loader.batch(0, 2)[0]
    assert all(np.array_equal(before[name], again[name]) for name in before)
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_sample_is_raised_when_it_is_asked_for(num_workers):
    class Broken(Numbers):
        def __getitem__(self, number):
            if number == 5:
                raise DataError("sample 5 is broken")
            return super().__getitem__(number)

    loader = BatchLoader(Broken(), 4, 1, num_workers=num_workers)
    assert numbers(loader, 0, 4) == [[0], [1], [2], [3]]
    with pytest.raises(DataError, match="sample 5 is broken"):
        loader.batch(4, 4)
    assert numbers(loader, 8, 2) == [[8], [9]]
    loader.close()


def test_every_evaluation_uses_the_same_samples():
    loader = BatchLoader(Numbers(), 4, 2, 0, 1)
    runs = [
        [
            batch["tokens"][:, 0].tolist()
            for step in evaluation_batches(loader, 2, 4)
            for batch in step
        ]
        for _ in range(2)
    ]
    assert runs[0] == runs[1] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def config(seq_length=8, seed=1234, **data):
    return SimpleNamespace(
        data=DataConfig(**data),
        model=SimpleNamespace(seq_length=seq_length),
        training=SimpleNamespace(seed=seed),
    )


@pytest.fixture
def corpus(tmp_path):
    """100 documents of 10 tokens; document i holds the token i, and 100 ends it."""
    with IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        for number in range(100):
            add_document(writer, [number] * 9 + [100])
    return str(tmp_path / "d")


def tokens_of(dataset: GPTDataset) -> set[int]:
    return {int(t) for i in range(len(dataset)) for t in dataset[i]["tokens"]}


def test_splits_share_no_document(corpus):
    made = build_datasets(
        config(data_path=(corpus,), split="80,15,5", tokenizer_type="NullTokenizer", vocab_size=100)
    )
    assert tokens_of(made.train) == {*range(80), 100}
    assert tokens_of(made.valid) == {*range(80, 95), 100}
    assert tokens_of(made.test) == {*range(95, 100), 100}
    # (800 - 1) // 8, (150 - 1) // 8, (50 - 1) // 8
    assert (len(made.train), len(made.valid), len(made.test)) == (99, 18, 6)


def test_the_default_split_is_megatrons(corpus):
    made = build_datasets(config(data_path=(corpus,), vocab_size=101))
    assert len(made.train) == (970 - 1) // 8
    assert len(made.valid) == (30 - 1) // 8
    assert made.test is None


def test_a_weight_before_a_single_prefix_is_accepted(corpus):
    assert build_datasets(config(data_path=("0.7", corpus), vocab_size=101)).train is not None


def test_separate_paths_take_whole_datasets(corpus):
    made = build_datasets(
        config(train_data_path=(corpus,), valid_data_path=(corpus,), vocab_size=101)
    )
    assert len(made.train) == len(made.valid) == 999 // 8
    assert made.test is None
    assert [made.train.position(i) for i in range(9)] != [made.valid.position(i) for i in range(9)]


def test_eod_mask_loss_masks_the_inputs(corpus):
    made = build_datasets(
        config(
            data_path=(corpus,),
            tokenizer_type="NullTokenizer",
            vocab_size=100,
            eod_mask_loss=True,
        )
    )
    for number in range(len(made.train)):
        sample = made.train[number]
        assert sample["loss_mask"].tolist() == (sample["tokens"] != 100).tolist()


def test_mock_data_needs_no_files():
    made = build_datasets(config(mock_data=True, vocab_size=64))
    assert made.train[0]["tokens"].max() < 64
    assert made.train[0]["tokens"].tolist() != made.valid[0]["tokens"].tolist()
    made = build_datasets(config(mock_data=True), tokenizer=NullTokenizer(9))
    assert made.train[0]["tokens"].max() < 10


def test_a_short_split_goes_round_for_training(corpus):
    train = build_datasets(config(data_path=(corpus,), vocab_size=101)).train
    loader = BatchLoader(train, 8, 4)
    positions = [train.position(i) for i in range(2 * len(train))]
    assert sorted(positions[: len(train)]) == sorted(positions[len(train) :])
    last = loader.batch(len(train) - 2, 4)[0]["tokens"]
    expected = np.stack([train[len(train) - 2 + i]["tokens"] for i in range(4)])
    assert np.array_equal(last, expected)


def test_errors_are_one_line(corpus, tmp_path):
    cases = [
        (
            {"data_path": (corpus,), "seq_length": 970},
            "97 documents with 970 tokens give no .* 971",
        ),
        ({"data_path": (corpus,), "split": "0,1,1"}, "0 documents with 0 tokens give no training"),
        ({"data_path": (f"{corpus}.bin",)}, "give the path without '.bin'"),
        ({"data_path": (str(tmp_path / "no"),)}, r"no\.idx: cannot be opened"),
        ({"data_path": (corpus,), "eod_mask_loss": True}, "--eod-mask-loss needs --tokenizer-type"),
    ]
    for data, message in cases:
        with pytest.raises(DataError, match=message) as caught:
            build_datasets(config(vocab_size=101, **data))
        assert "\n" not in str(caught.value)


def test_a_corpus_of_another_tokenizer_is_noticed(corpus):
    train = build_datasets(config(data_path=(corpus,), vocab_size=50)).train
    with pytest.raises(DataError, match="outside the vocabulary"):
        for number in range(len(train)):
            train[number]


def test_the_dataset_is_not_read_into_memory(corpus):
    data = IndexedDataset(corpus)
    assert isinstance(data.tokens(0, 5).base, np.memmap)
