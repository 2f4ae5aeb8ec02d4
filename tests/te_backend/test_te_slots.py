"""Scale state of stock TE modules: out, in, into a registry, at other window lengths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.errors import PrecisionError
from megafp8.numerics import Recipe, ScaleRegistry
from tests.support import te_cpu
from tests.support.ranks import Ranks

NAME = "decoder.layers.0.mlp.linear_fc1"
SLOTS = {"Linear": 3, "LayerNormLinear": 3, "LayerNormMLP": 6, "GroupedLinear": 6}


def build(kind: str, history: int) -> tuple[Any, Any, Callable[[int], Tensor]]:
    """A module, a recipe, and a function that trains it for one pass and gives y."""
    te = te_cpu.load()
    from transformer_engine.common.recipe import DelayedScaling

    options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu"}
    torch.manual_seed(5)
    sizes = (2, 32, 32) if kind == "GroupedLinear" else (32, 64 if kind == "LayerNormMLP" else 32)
    module = getattr(te, kind)(*sizes, **options)
    recipe = DelayedScaling(amax_history_len=history)

    def run(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        x = (torch.randn(32, 32, generator=generator) * 2.0 ** (number % 5)).bfloat16()
        more = ([16, 16],) if kind == "GroupedLinear" else ()
        with te.autocast(enabled=True, recipe=recipe):
            y = module(x.requires_grad_(True), *more)
        y.float().square().sum().backward()
        return y.detach().float()

    return module, recipe, run


def moved(kind: str, longer: int) -> dict[str, Any]:
    """Train, export, continue; import into a fresh module of another window and continue there."""
    te_cpu.load()
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from megafp8.layers.transformer_engine.slots import export_state, import_state

    FP8GlobalStateManager.reset()
    module, _, run = build(kind, 8)
    for number in range(4):
        run(number)
    state = export_state(module, NAME)
    raw = {key: module.fp8_meta[key].amax_history.clone() for key in ("scaling_fwd", "scaling_bwd")}
    wanted = run(4)
    FP8GlobalStateManager.reset()
    other, recipe, again = build(kind, longer)
    fresh = import_state(other, NAME, state, recipe)
    pointers = [other.fp8_meta[key].scale.data_ptr() for key in ("scaling_fwd", "scaling_bwd")]
    back = export_state(other, NAME)
    found = again(4)
    kept = [other.fp8_meta[key].scale.data_ptr() for key in ("scaling_fwd", "scaling_bwd")]
    return {
        "state": state,
        "raw": raw,
        "back": back,
        "fresh": fresh,
        "equal": torch.equal(found, wanted) and kept == pointers,
        "empty": import_state(build(kind, 4)[0], NAME, {}, recipe),
    }


@pytest.mark.parametrize("length", [4, 8, 16])
@pytest.mark.parametrize("kind", SLOTS)
def test_state_moves(te_ranks: Ranks, kind: str, length: int) -> None:
    (found,) = te_ranks.run(moved, world_size=1, kind=kind, longer=length)
    state, back = found["state"], found["back"]
    assert len(state) == 2 * SLOTS[kind] and found["fresh"] == 0
    assert found["empty"] == SLOTS[kind]
    assert found["equal"], "the moved module did not continue as the first one"
    for key, value in state.items():
        if key.endswith(".scale"):
            assert value != 1.0 and torch.equal(back[key], value), key
            continue
        assert value.shape == (8,) and (value > 0).sum() == 4, key
        newest = min(length - 1, 4)
        assert back[key].shape == (length,)
        assert torch.equal(back[key][-newest:], value[-newest:])
        assert not back[key][:-newest].any()
    first = "expert0." if kind == "GroupedLinear" else "fc1." if kind == "LayerNormMLP" else ""
    window = state[f"fp8.{NAME}.{first}grad_output.amax_history"]
    assert torch.equal(window[1:], found["raw"]["scaling_bwd"][1:, 0])


def test_state_goes_into_a_registry(te_ranks: Ranks) -> None:
    (found,) = te_ranks.run(moved, world_size=1, kind="Linear", longer=8)
    registry = ScaleRegistry(Recipe(amax_history_len=16))
    for role in ("input", "weight", "grad_output"):
        registry.register(NAME, role)  # type: ignore[arg-type]
    registry.finalize("cpu")
    assert registry.load(found["state"]) == 0
    for key, value in registry.tensors().items():
        stored = found["state"][key]
        assert torch.equal(value, stored) if value.dim() == 0 else torch.equal(value[-8:], stored)


def attention() -> tuple[dict[str, Tensor], dict[str, list[float]], str, str]:
    te = te_cpu.load()
    from transformer_engine.common.recipe import DelayedScaling

    from megafp8.layers.transformer_engine.slots import export_state, import_state

    recipe = DelayedScaling(amax_history_len=4, fp8_dpa=True)
    module = te.DotProductAttention(4, 16)
    roles = ("qkv", "output", "softmax", "grad_qkv", "grad_output", "grad_softmax")
    state = {}
    for number, role in enumerate(roles):
        state[f"fp8.a.{role}.scale"] = torch.tensor(2.0**number)
        state[f"fp8.a.{role}.amax_history"] = torch.arange(4.0) * (number + 1)
    said = []
    for wrong in (module, torch.nn.Linear(2, 2)):
        try:
            export_state(wrong, "a")
            said.append("")
        except PrecisionError as error:
            said.append(str(error))
    assert import_state(module, "a", state, recipe) == 0
    scales = {key: module.fp8_meta[key].scale.tolist() for key in ("scaling_fwd", "scaling_bwd")}
    back = export_state(module, "a")
    assert all(torch.equal(back[key], state[key]) for key in state) and len(back) == 12
    return back, scales, said[0], said[1]


def test_attention_slots(te_ranks: Ranks) -> None:
    ((_, scales, early, unknown),) = te_ranks.run(attention, world_size=1)
    assert [scales["scaling_fwd"][slot] for slot in (2, 3, 8)] == [1.0, 2.0, 4.0]
    assert [scales["scaling_bwd"][slot] for slot in (0, 3, 5)] == [8.0, 16.0, 32.0]
    assert early.startswith("a: has no FP8 state yet") and unknown.startswith("Linear has no known")
