"""Scale state of ranks moved to another number of ranks, on values made by hand."""

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint.rank_scales import (
    describe_move,
    describe_ranks,
    local_entry,
    move_ranks,
    sources,
)
from megafp8.checkpoint.record import TensorEntry
from megafp8.config import Layout

SCALE, HISTORY = "fp8_local.a.input.scale", "fp8_local.a.input.amax_history"


def history(*rows: list[float]) -> Tensor:
    """[1, tp, H] of one data-parallel rank."""
    return torch.tensor([list(rows)])


def test_tensor_parallel_ranks_merge_by_element_wise_maximum() -> None:
    windows = history([0.0, 1.0, 5.0], [2.0, 4.0, 3.0])
    assert move_ranks(HISTORY, windows, 1, 1).tolist() == [[[2.0, 4.0, 5.0]]]
    scales = torch.tensor([[448 / 5.0, 448 / 4.0]])
    assert move_ranks(SCALE, scales, 1, 1).tolist() == [[pytest.approx(448 / 5.0)]]


def test_data_parallel_ranks_merge_the_same_way() -> None:
    windows = history([0.0, 1.0], [7.0, 0.5]).transpose(0, 1)  # [dp 2, tp 1, H]
    assert move_ranks(HISTORY, windows, 1, 1).tolist() == [[[7.0, 1.0]]]


def test_a_split_copies() -> None:
    windows = history([1.0, 2.0])
    split = move_ranks(HISTORY, windows, 2, 2)
    assert split.tolist() == [[[1.0, 2.0]] * 2] * 2


def test_neighbours_merge_and_split() -> None:
    """4 -> 2 joins 0 with 1 and 2 with 3; 2 -> 4 gives each to two; 3 -> 2 shares the middle."""
    scales = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    assert move_ranks(SCALE, scales, 1, 2).tolist() == [[3.0, 1.0]]
    assert move_ranks(SCALE, scales[:, :2], 1, 4).tolist() == [[4.0, 4.0, 3.0, 3.0]]
    assert move_ranks(SCALE, scales[:, :3], 1, 2).tolist() == [[3.0, 2.0]]
    assert [list(sources(i, 2, 3)) for i in range(2)] == [[0, 1], [1, 2]]
    assert [list(sources(i, 3, 2)) for i in range(3)] == [[0], [0, 1], [1]]


def test_one_axis_splits_while_the_other_merges() -> None:
    scales = torch.tensor([[8.0], [2.0]])  # dp 2 x tp 1
    assert move_ranks(SCALE, scales, 1, 2).tolist() == [[2.0, 2.0]]
    assert describe_move(SCALE, (2, 1), 1, 2) == (
        "dp 2 -> 1 merged (scales of the merged histories), tp 1 -> 2 copied"
    )


def test_the_same_ranks_keep_their_own() -> None:
    windows = torch.rand(2, 3, 5)
    assert torch.equal(move_ranks(HISTORY, windows, 2, 3), windows)
    assert describe_move(HISTORY, (2, 3), 2, 3) == "kept"


def test_there_and_back_is_the_maximum_on_every_rank() -> None:
    windows = torch.rand(2, 2, 5)
    back = move_ranks(HISTORY, move_ranks(HISTORY, windows, 1, 1), 2, 2)
    assert torch.equal(back, windows.amax((0, 1)).expand(2, 2, 5))


def test_words_and_shapes() -> None:
    layout = Layout(4, {"tp": 2, "fsdp": 2})
    assert describe_ranks((2, 2), layout, reduced=False) == "each rank keeps its own"
    assert describe_ranks((2, 2), layout, reduced=True) == (
        "dp 2 -> 1 merged by element-wise maximum (scales of the merged histories), "
        "tp 2 -> 1 merged by element-wise maximum (scales of the merged histories)"
    )
    entry = TensorEntry((2, 2, 8), "float32")
    assert local_entry(HISTORY, entry, 1, 4).shape == (1, 4, 8)
    assert local_entry("fp8.a.input.amax_history", entry, 1, 4) == entry
