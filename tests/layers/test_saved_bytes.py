"""What a block keeps for its backward pass, counted by bench/memory.py."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from bench.model import Sizes
from tests.model.small import world

pytestmark = pytest.mark.usefixtures("one_rank")
SIZES = Sizes(hidden=512, ffn=1792, heads=8, groups=2, seq=128, batch=1)
UNIT = SIZES.tokens * SIZES.hidden


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "bench" / "memory.py"
    spec = importlib.util.spec_from_file_location("bench_memory", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fp8_linears_keep_half_of_what_bf16_keeps(memory: ModuleType) -> None:
    found = {
        name: memory.linear_bytes(SIZES, world(), flags)
        for name, flags in memory.PRECISIONS.items()
    }
    inputs = sum(inner for inner, _ in SIZES.linears.values())
    assert found["bf16"] == 2 * SIZES.tokens * inputs
    assert found["fp8 delayed"] == SIZES.tokens * inputs, "one byte, and one copy"
    high = found.pop("fp8 rowwise_with_gw_hp"), found.pop("bf16")
    assert high[0] == high[1], "its weight gradient reads the input in BF16"
    assert len(found) == 5 and max(found.values()) <= 0.55 * high[1], "codes and their scales"


def test_block_keeps_less_in_fp8_and_under_recompute(memory: ModuleType) -> None:
    kept = {
        (name, mode): memory.block_bytes(SIZES, world(), flags, mode)
        for name, flags in memory.PRECISIONS.items()
        if name in ("bf16", "fp8 delayed", "fp8 mxfp8")
        for mode in memory.MODES
    }
    # Inputs of linears in one byte instead of two. Without recompute the attention core keeps its
    # result in BF16 anyway, which a BF16 linear_proj shares and an FP8 one does not.
    h, f = SIZES.hidden, SIZES.ffn
    saved = {mode: kept["bf16", mode] - kept["fp8 delayed", mode] for mode in memory.MODES}
    assert saved[None] == SIZES.tokens * (h + f)
    assert saved["selective"] == SIZES.tokens * (3 * h + f)
    for name in ("bf16", "fp8 delayed", "fp8 mxfp8"):
        assert kept[name, "selective"] < kept[name, None]
        assert kept[name, "full"] == 2 * UNIT, "the block's input alone"
