"""Samples: exact tokens at every border, the order of epochs, splits, masks that do not leak."""

import numpy as np
import pytest

from megafp8.data.gpt_dataset import GPTDataset, MockGPTDataset, make_sample, split_documents
from megafp8.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megafp8.errors import DataError
from tests.support.corpora import add_document


def indexed(path, documents) -> IndexedDataset:
    with IndexedDatasetWriter(path, np.uint16) as writer:
        for document in documents:
            add_document(writer, document)
    return IndexedDataset(path)


def whole(data: IndexedDataset, seq_length: int, **options) -> GPTDataset:
    return GPTDataset(data, range(len(data)), seq_length, seed=1234, **options)


def in_order(dataset: GPTDataset) -> list:
    """The samples of the first epoch as they lie in the stream."""
    return [dataset[i] for i in sorted(range(len(dataset)), key=dataset.position)]


@pytest.fixture
def degenerate(tmp_path) -> IndexedDataset:
    """Twenty tokens, an empty document and a single token, each ended by 0: 23 tokens."""
    return indexed(tmp_path / "d", [[*range(10, 30), 0], [], [40, 0]])


def test_degenerate_documents(degenerate):
    samples = in_order(whole(degenerate, 8))
    assert degenerate.num_tokens == 23 and len(samples) == 2
    assert samples[0]["tokens"].tolist() == list(range(10, 18))
    assert samples[0]["labels"].tolist() == list(range(11, 19))
    assert samples[1]["tokens"].tolist() == list(range(18, 26))
    assert samples[1]["labels"].tolist() == list(range(19, 27))
    # The leftover 27, 28, 29, 0, 40, 0 is dropped.


@pytest.mark.parametrize(("seq_length", "samples"), [(1, 22), (7, 3), (11, 2), (21, 1), (22, 1)])
def test_sample_counts(degenerate, seq_length, samples):
    dataset = in_order(whole(degenerate, seq_length))
    assert len(dataset) == samples
    stream = degenerate.tokens(0, 23).tolist()
    for number in range(samples):
        start = number * seq_length
        assert dataset[number]["tokens"].tolist() == stream[start : start + seq_length]
        assert dataset[number]["labels"].tolist() == stream[start + 1 : start + seq_length + 1]


def test_too_few_tokens_for_a_sample(degenerate):
    dataset = whole(degenerate, 23)
    assert len(dataset) == 0
    with pytest.raises(DataError, match=r"3 documents with 23 tokens give no sample of 23 \+ 1"):
        dataset[0]


@pytest.mark.parametrize("documents", [[], [[]], [[], []], [[5]]])
def test_no_samples_at_all(tmp_path, documents):
    assert len(whole(indexed(tmp_path / "d", documents), 1)) == 0


def test_types_and_shapes(degenerate):
    sample = whole(degenerate, 8)[0]
    assert {name: (array.dtype.name, array.shape) for name, array in sample.items()} == {
        "tokens": ("int64", (8,)),
        "labels": ("int64", (8,)),
        "loss_mask": ("float32", (8,)),
        "position_ids": ("int64", (8,)),
    }
    assert sample["position_ids"].tolist() == list(range(8))


def test_each_epoch_is_another_order_of_the_same_samples(tmp_path):
    dataset = whole(indexed(tmp_path / "d", [list(range(1, 1002))]), 10)
    assert len(dataset) == 100
    epochs = [[dataset.position(100 * epoch + i) for i in range(100)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(100))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(100))
    # Random access: going back gives the same numbers.
    assert [dataset.position(i) for i in range(100)] == epochs[0]
    assert dataset[250]["tokens"][0] == 1 + 10 * epochs[2][50]


def test_order_depends_on_seed_and_split_alone(tmp_path):
    data = indexed(tmp_path / "d", [list(range(1, 502))])

    def order(seed, split="train"):
        dataset = GPTDataset(data, range(1), 5, seed, split=split)
        return [dataset.position(i) for i in range(100)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(1, "valid")


def test_a_split_reads_its_documents_only(tmp_path):
    data = indexed(tmp_path / "d", [[1] * 9, [], [2] * 9, [3] * 5, [], [4] * 9])
    dataset = GPTDataset(data, range(1, 5), 4, 0, split="valid")
    assert dataset.num_tokens == 14 and len(dataset) == 3
    seen = [token for sample in in_order(dataset) for token in sample["tokens"].tolist()]
    assert seen == [2] * 9 + [3] * 3


def test_an_id_outside_the_vocabulary_is_an_error(tmp_path):
    data = indexed(tmp_path / "d", [[1, 2, 3], [4, 99, 100]])
    assert whole(data, 5, vocab_size=101)[0]["labels"].tolist() == [2, 3, 4, 99, 100]
    with pytest.raises(DataError, match=r"document 1 holds token id 100, outside .*\(0\.\.99\)"):
        whole(data, 5, vocab_size=100)[0]


# Megatron-core 0.16.1: parse_and_normalize_split, convert_split_vector_to_split_matrix and the
# rounding of BlendedMegatronDatasetBuilder.
@pytest.mark.parametrize(
    ("weights", "documents", "edges"),
    [
        ((969, 30, 1), 0, (0, 0)),
        ((969, 30, 1), 5, (5, 5)),
        ((969, 30, 1), 50, (48, 50)),
        ((969, 30, 1), 200, (194, 200)),
        ((969, 30, 1), 796, (771, 795)),
        ((969, 30, 1), 1001, (970, 1000)),
        ((90, 10, 0), 5, (4, 5)),
        ((90, 10, 0), 796, (716, 796)),
        ((1, 1, 1), 1, (0, 1)),
        ((1, 1, 1), 5, (2, 3)),
        ((0, 1, 1), 1, (0, 0)),
        ((0, 1, 1), 3, (0, 2)),
        ((99.5, 0.5, 0), 200, (199, 200)),
        ((1, 0, 1), 5, (2, 2)),
        ((1, 0, 1), 1001, (500, 500)),
    ],
)
def test_splits_are_megatrons(weights, documents, edges):
    first, second = edges
    assert split_documents(weights, documents) == (
        range(0, first),
        range(first, second),
        range(second, documents),
    )


def test_masks_of_one_sample_do_not_leak_into_another():
    windows = {
        1: [5, 6, 0, 7, 8, 0, 9, 1, 2],
        2: [1, 2, 3, 4, 5, 6, 7, 8, 9],
    }
    for number in (1, 2, 1, 2, 2):
        sample = make_sample(np.array(windows[number]), eod_to_mask=0)
        expected = [1, 1, 0, 1, 1, 0, 1, 1] if number == 1 else [1] * 8
        assert sample["loss_mask"].tolist() == expected
        assert sample["position_ids"].tolist() == list(range(8))
        for array in sample.values():
            array[:] = 0  # what a careless user does to the arrays that were handed out
    assert make_sample(np.array(windows[1]))["loss_mask"].tolist() == [1] * 8


def test_samples_can_be_changed_by_their_user(degenerate):
    dataset = whole(degenerate, 8, eod_to_mask=12)
    number = [dataset.position(0), dataset.position(1)].index(0)
    first = dataset[number]
    assert first["loss_mask"].tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    for array in first.values():
        array[:] = 77
    again = dataset[number]
    assert again["tokens"].tolist() == list(range(10, 18))
    assert again["loss_mask"].tolist() == [1, 1, 0, 1, 1, 1, 1, 1]
    assert degenerate.tokens(0, 3).tolist() == [10, 11, 12]


@pytest.mark.parametrize("vocab_size", [1, 2, 31, 32, 33, 100, 50304])
def test_mock_ids_are_in_range_and_spread(vocab_size):
    dataset = MockGPTDataset(64, vocab_size, seed=1)
    tokens = np.concatenate([dataset[i]["tokens"] for i in range(400)])
    assert tokens.min() == 0 and tokens.max() < vocab_size
    used = np.unique(tokens)
    assert len(used) <= 32
    if vocab_size >= 32:
        # Every quarter of the vocabulary, so every shard of it, sees tokens.
        assert set(used * 4 // vocab_size) == {0, 1, 2, 3}


def test_mock_samples_depend_on_seed_split_and_number():
    def tokens(seed=1, split="train", number=0):
        return MockGPTDataset(64, 100, seed, split=split)[number]["tokens"].tolist()

    assert tokens() == tokens()
    assert tokens() != tokens(seed=2)
    assert tokens() != tokens(split="valid")
    assert tokens() != tokens(number=1)
    sample = MockGPTDataset(64, 100, 1)[7]
    assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()


def test_mock_entropies_are_what_the_docstring_says():
    dataset = MockGPTDataset(256, 100, seed=3)
    pairs = np.zeros((100, 100))
    for number in range(300):
        sample = dataset[number]
        np.add.at(pairs, (sample["tokens"], sample["labels"]), 1)
    total = pairs.sum()
    labels = pairs.sum(0)[pairs.sum(0) > 0] / total
    unigram = -(labels * np.log(labels)).sum()
    given = pairs / np.maximum(pairs.sum(1, keepdims=True), 1)
    conditional = -(pairs[pairs > 0] / total * np.log(given[pairs > 0])).sum()
    assert unigram == pytest.approx(2.4, abs=0.1)
    assert conditional == pytest.approx(0.85, abs=0.05)


def test_a_small_model_learns_the_mock_stream():
    """More than one nat in 20 steps: a run with --mock-data must show whether training works."""
    import torch

    dataset = MockGPTDataset(32, 100, seed=1234)
    embedding = torch.nn.Embedding(100, 32)
    norm, head = torch.nn.LayerNorm(32), torch.nn.Linear(32, 100, bias=False)
    torch.nn.init.normal_(embedding.weight, std=0.02)
    torch.nn.init.normal_(head.weight, std=0.02)
    parameters = [*embedding.parameters(), *norm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    losses = []
    for iteration in range(20):
        samples = [dataset[8 * iteration + row] for row in range(8)]
        tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]))
        labels = torch.from_numpy(np.stack([sample["labels"] for sample in samples]))
        logits = head(norm(embedding(tokens)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(100), abs=0.1)
    assert losses[-1] < losses[0] - 1.0
