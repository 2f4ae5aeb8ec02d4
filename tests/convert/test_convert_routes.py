"""Fused queries, keys and values row by row, on numbers that say where a row came from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megafp8.checkpoint.tensors import bytes_view
from megafp8.config import ModelShape
from megafp8.convert.hf_names import routes
from megafp8.convert.items import Item, as_they_are, nbytes
from megafp8.convert.routes import Described, join_qkv, split_qkv
from megafp8.convert.safetensors_files import into_shards, write_safetensors
from tests.model.small import VOCAB, small_config

FUSED = {
    # Groups -> order of 4 query heads of 2 rows, keys from 100, values from 200.
    1: [0, 1, 2, 3, 4, 5, 6, 7, 100, 101, 200, 201],
    2: [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203],
    4: [
        *(0, 1, 100, 101, 200, 201, 2, 3, 102, 103, 202, 203),
        *(4, 5, 104, 105, 204, 205, 6, 7, 106, 107, 206, 207),
    ],
}


def shape_of(groups: int) -> ModelShape:
    shape = ModelShape.from_config(small_config(), VOCAB)
    return replace(shape, hidden_size=8, num_heads=4, num_groups=groups, head_dim=2, qkv_bias=True)


def rows(start: int, count: int, columns: int | None) -> Tensor:
    numbers = torch.arange(start, start + count, dtype=torch.float32)
    return numbers if columns is None else numbers[:, None].expand(count, columns).contiguous()


@pytest.mark.parametrize("groups", FUSED)
@pytest.mark.parametrize("columns", [8, None], ids=["weight", "bias"])
def test_rows_are_grouped_by_key_head(groups: int, columns: int | None) -> None:
    shape = shape_of(groups)
    parts = [rows(0, 8, columns), rows(100, 2 * groups, columns), rows(200, 2 * groups, columns)]
    fused = join_qkv(parts, shape)
    first = fused if columns is None else fused[:, 0]
    assert first.tolist() == FUSED[groups]
    back = split_qkv(fused, shape)
    assert all(torch.equal(one, other) for one, other in zip(parts, back, strict=True))
    if groups == 2:  # two tensor-parallel ranks: a group each
        assert first[:8].tolist() == FUSED[2][:8]


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_route_is_exact_both_ways(model_type: str) -> None:
    gpt2 = model_type == "gpt2"
    shape = replace(shape_of(4 if gpt2 else 2), swiglu=not gpt2, layernorm_bias=gpt2)
    for route in routes(model_type, replace(shape, mlp_bias=True, attention_output_bias=True)):
        theirs = [torch.randn(sizes) for sizes in route.shapes]
        if "vocab" not in route.ours and "embeddings" not in route.ours:
            back = route.split(route.join(theirs))
            assert all(torch.equal(a, b) for a, b in zip(theirs, back, strict=True)), route.ours


def test_an_item_is_what_it_announced() -> None:
    """The header of a file is written before its tensors: one of another size would shift all."""
    seen: list[str] = []
    for tensor in (torch.zeros(2), torch.zeros(2, 3).half(), torch.zeros(2, 3)):
        item = Item({"x": Described((2, 3), torch.float32)}, lambda tensor=tensor: [tensor])
        if tensor.shape == (2, 3) and tensor.dtype == torch.float32:
            item.write(lambda name, value: seen.append(name))
            continue
        with pytest.raises(AssertionError, match="x"):
            item.write(lambda name, value: seen.append(name))
    assert seen == ["x"] and item.nbytes == 24


def test_files_are_cut_between_items() -> None:
    items = [Item({str(n): Described((n,), torch.float32)}, list) for n in (1, 2, 9, 1)]
    shards = into_shards(items, 12)
    assert [[*item.entries][0] for part in shards.values() for item in part] == ["1", "2", "9", "1"]
    assert [nbytes(part) for part in shards.values()] == [12, 36, 4]
    assert [*shards][0] == "model-00001-of-00003.safetensors"
    assert [*into_shards(items, 1000)] == ["model.safetensors"]


def test_bytes_of_a_single_element_with_any_stride(tmp_path: Path) -> None:
    """What `contiguous` leaves alone: the strides of a dimension of one say nothing."""
    strided = torch.arange(12.0).view(3, 4).t()[1:2, 2:3]
    alone = torch.arange(7.0)[1::5][:1]
    assert (strided.stride(), alone.stride()) == ((1, 4), (5,))
    for tensor in (strided, alone):
        assert bytes_view(tensor).numpy().tobytes() == tensor.clone().numpy().tobytes()
    items = as_they_are({"strided": strided, "alone": alone})
    write_safetensors(tmp_path / "x.safetensors", items, lambda count: None)
    found = load_file(tmp_path / "x.safetensors")
    assert (found["strided"].item(), found["alone"].item()) == (9.0, 1.0)
