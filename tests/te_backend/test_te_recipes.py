"""Recipes by TransformerEngine's names: fields, refusals, current scaling against arithmetic."""

import copy
import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.config.cli import load_config
from megafp8.errors import ConfigurationError, PrecisionError
from megafp8.evaluation import validation_loss
from megafp8.layers import LinearOptions
from megafp8.layers.transformer_engine import availability
from megafp8.numerics import E4M3, E5M2, Recipe
from tests.model.small import FP8, GPT2, layer_context, small_config
from tests.support import te_cpu
from tests.support.layouts import PARITY, ROOT, SP, degrees
from tests.support.limits import PATIENCE_S
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL, TE, start_te, te_curve, train

NAME = "decoder.layers.0.self_attention.linear_qkv"
TENSORWISE = ("--fp8-recipe", "tensorwise")
# What blocks of 128 need.
BLOCK_SIZES = (
    *("--hidden-size", "256", "--ffn-hidden-size", "512", "--num-attention-heads", "4"),
    *(
        "--num-query-groups",
        "2",
        "--num-layers",
        "2",
        "--seq-length",
        "256",
        "--max-position-embeddings",
        "256",
    ),
    *("--micro-batch-size", "2", "--global-batch-size", "4"),
)
CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


def run(te_ranks: Ranks, function: Any, **kwargs: Any) -> Any:
    return te_ranks.run(function, world_size=1, **kwargs)[0]


# ------------------------------------------------------------------------------ fields, refusals


def made(name: str, gradients: str, power_of_2: bool, environment: str) -> dict[str, Any]:
    """The fields of TE's recipe, and what its quantizers will read, whatever TE's defaults are."""
    te_cpu.load()
    from transformer_engine.common import recipe as te_recipes

    from megafp8.layers.transformer_engine.recipes import te_recipe

    # As if TE had been imported with the other value in its environment.
    other = te_recipes.QParams(power_2_scale=environment == "1")
    classes = (te_recipes.Float8CurrentScaling, te_recipes.Float8BlockScaling)
    names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    former = {(cls, field): getattr(cls, field) for cls in classes for field in names}
    for cls, field in former:
        setattr(cls, field, other)
    try:
        ours = Recipe(
            name=name,
            gradient_format=E4M3 if gradients == "e4m3" else E5M2,
            power_of_2_scales=power_of_2,
        )
        recipe: Any = te_recipe(ours)
        scales = [getattr(recipe, field).power_2_scale for field in names if hasattr(recipe, field)]
        return {
            "class": type(recipe).__name__,
            "format": recipe.fp8_format.name,
            "scales": scales,
            "override": recipe.backward_override,
            "attention": (recipe.fp8_dpa, recipe.fp8_mha),
            "gemms": [
                getattr(recipe, f"fp8_gemm_{gemm}").use_split_accumulator
                for gemm in ("fprop", "dgrad", "wgrad")
                if hasattr(recipe, "fp8_gemm_fprop")
            ],
            "fields": {field.name for field in dataclasses.fields(recipe)},
        }
    finally:
        for (cls, field), value in former.items():
            setattr(cls, field, value)


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", CLASSES)
def test_recipe_is_te_s_with_our_choices(te_ranks: Ranks, name: str, gradients: str) -> None:
    for power_of_2 in (True,) if name == "mxfp8" else (False, True):
        for environment in ("0", "1"):
            found = run(
                te_ranks,
                made,
                name=name,
                gradients=gradients,
                power_of_2=power_of_2,
                environment=environment,
            )
            assert found["class"] == CLASSES[name]
            assert found["format"] == ("E4M3" if gradients == "e4m3" else "HYBRID")
            assert found["scales"] == (
                [power_of_2] * 3 if name in ("tensorwise", "blockwise") else []
            )
            assert found["override"] is None and found["attention"] == (False, False)
            wanted = {"tensorwise": [False, True, True], "blockwise": [True] * 3}
            assert found["gemms"] == wanted.get(name, [])


def unknown() -> str:
    te_cpu.load()
    from megafp8.layers.transformer_engine.recipes import te_recipe

    recipe = copy.copy(Recipe())
    object.__setattr__(recipe, "name", "rowwise")
    try:
        te_recipe(recipe)
    except PrecisionError as error:
        return str(error)
    return ""


def test_unknown_recipe(te_ranks: Ranks) -> None:
    assert run(te_ranks, unknown) == (
        "TransformerEngine has no recipe 'rowwise'; allowed: delayed, tensorwise, blockwise, mxfp8"
    )


@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp"])
def test_row_scales_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config([*PARITY, *TE, "--fp8-recipe", name])
    assert str(caught.value).endswith(
        f"--transformer-impl transformer_engine: --fp8-recipe {name}: TransformerEngine has no "
        "scales by row; allowed with it: delayed, tensorwise, blockwise, mxfp8"
    )


class _Device:
    """TE's own answers on a device of some compute capability (2.20.2, CUDA 13)."""

    def __init__(self, major: int, minor: int) -> None:
        self.capability = (major, minor)

    def is_fp8_available(self, return_reason: bool = False) -> tuple[bool, str]:
        return self.capability >= (8, 9), "8.9 or higher required"

    def is_mxfp8_available(self, return_reason: bool = False) -> tuple[bool, str]:
        return (10, 0) <= self.capability < (12, 0), "10.0 or higher required"

    def is_fp8_block_scaling_available(self, return_reason: bool = False) -> tuple[bool, str]:
        return self.capability >= (9, 0), "9.0 or higher and CUDA >= 12.9"


@pytest.mark.parametrize(
    ("capability", "able"),
    [
        ((8, 0), set()),
        ((8, 9), {"delayed", "tensorwise"}),
        ((9, 0), {"delayed", "tensorwise", "blockwise"}),
        ((10, 0), {"delayed", "tensorwise", "mxfp8"}),
        ((12, 0), {"delayed", "tensorwise"}),
    ],
)
def test_device_decides(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], able: set[str]
) -> None:
    monkeypatch.setattr(availability, "version", lambda: "2.20.2")
    monkeypatch.setattr(availability.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(availability.torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(availability, "import_te", lambda: _Device(*capability))
    found = {name: availability.available(name) for name in CLASSES}
    assert {name for name, (usable, _) in found.items() if usable} == able
    for name, (usable, reason) in found.items():
        if not usable:
            head = f"TransformerEngine 2.20.2 has no FP8 recipe {name} here: "
            assert reason.startswith(head) and "\n" not in reason
    assert availability.available() == (True, "TransformerEngine 2.20.2")


# -------------------------------------------------------------------------- current scaling


def current(x: Tensor, dtype: torch.dtype, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """(codes, 1 / scale) by hand: 448 or 57344 over the tensor's own amax."""
    largest = torch.finfo(dtype).max
    scale = torch.tensor(largest, dtype=torch.float32) / x.float().abs().max()
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).clamp(-largest, largest).to(dtype), 1 / scale


def by_hand(x: Tensor, w: Tensor, dy: Tensor, power_of_2: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dw in bf16 from FP8 codes, products added in fp32."""
    (x8, xs), (w8, ws) = (current(t, torch.float8_e4m3fn, power_of_2) for t in (x, w))
    dy8, dys = current(dy, torch.float8_e5m2, power_of_2)
    xv, wv, dyv = x8.float() * xs, w8.float() * ws, dy8.float() * dys
    return (xv @ wv.t()).bfloat16(), (dyv @ wv).bfloat16(), (dyv.t() @ xv).bfloat16()


def one_linear(power_of_2: bool, cache: bool) -> dict[str, Any]:
    te_cpu.load()
    from megafp8.layers.transformer_engine.backend import TransformerEngineBackend
    from tests.support.te_cpu import emulation

    flags = {**FP8, "fp8_amax_history_len": None, "fp8_recipe": "tensorwise"}
    flags["disable_bias_linear"] = True
    context = layer_context(
        small_config(GPT2, transformer_impl="transformer_engine", **flags), cache_weights=cache
    )
    assert context.recipe is not None and context.registry is not None
    recipe = dataclasses.replace(context.recipe, power_of_2_scales=power_of_2)
    backend = TransformerEngineBackend(recipe, context.mesh)
    linear: Any = backend.linear(context, LinearOptions(NAME, "column", True, False))
    linear.to(torch.bfloat16)
    context.registry.finalize("cpu")
    weight = linear.weight.to_local()
    x = torch.randn(32, weight.shape[1]).mul(3).bfloat16()
    dy = torch.randn(32, weight.shape[0]).mul(1e-3).bfloat16()
    leaf = x.view(16, 2, -1).clone().requires_grad_(True)
    emulation.CALLS.clear()
    with backend.scope():
        y = linear(leaf)
    y.backward(dy.view(16, 2, -1))
    found = (y.flatten(0, 1), leaf.grad.flatten(0, 1), linear.weight.grad.to_local())
    wanted = by_hand(x, weight.detach(), dy, power_of_2)
    return {
        "equal": [torch.equal(ours, hand) for ours, hand in zip(found, wanted, strict=True)],
        "nonzero": all(bool(part.any()) for part in wanted),
        "registered": len(context.registry),
        "casts": dict(emulation.CALLS),
        "said": repr(linear),
    }


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("power_of_2", [False, True])
def test_products_of_current_scaling_by_hand(
    te_ranks: Ranks, power_of_2: bool, cache: bool
) -> None:
    found = run(te_ranks, one_linear, power_of_2=power_of_2, cache=cache)
    assert found["equal"] == [True, True, True] and found["nonzero"]
    assert found["registered"] == 0  # no state of delayed scaling
    assert found["casts"] == {"Float8CurrentScalingQuantizer": 3}
    assert "fp8 tensorwise: input e4m3" in found["said"]


def test_training_follows_bf16(ranks: Ranks, te_ranks: Ranks) -> None:
    command = (*PARITY, *SMALL, *degrees())
    bf16 = (*command, "--fp8-format", "none")
    (wanted,) = ranks.run(train, world_size=1, flags=bf16, iterations=8)
    (found,) = te_ranks.run(te_curve, world_size=1, flags=(*command, *TENSORWISE), iterations=8)
    assert not any(found.skipped) and found.losses[-1] < found.losses[0]
    for ours, theirs in zip(found.losses, wanted.curve.losses, strict=True):
        assert abs(ours / theirs - 1) < 0.02
    assert found.losses != wanted.curve.losses  # it is FP8
    assert all("amax_all_reduce" not in calls for calls in found.comm_calls)


def test_training_on_two_ranks(te_ranks: Ranks) -> None:
    """Gathered operands share a scale, so the loss stays close to that of one rank."""
    (alone,) = te_ranks.run(
        te_curve, world_size=1, flags=(*PARITY, *SMALL, *degrees(), *TENSORWISE), iterations=4
    )
    two = te_ranks.run(
        te_curve,
        world_size=2,
        flags=(*PARITY, *SMALL, *degrees(2, 1, SP), *TENSORWISE),
        iterations=4,
    )
    assert two[0].losses == two[1].losses
    for ours, theirs in zip(two[0].losses, alone.losses, strict=True):
        assert abs(ours / theirs - 1) < 5e-3


def evaluated(layers: tuple[str, ...]) -> tuple[list[float], list[float], int]:
    """Losses of four steps without and with an evaluation in the middle."""
    flags = (*PARITY, *SMALL, *degrees(), *TENSORWISE, *layers)
    plain = start_te(flags).iterate(4).losses
    training = start_te(flags)
    losses = training.iterate(2).losses
    validation_loss(training.model, training.loader, training.mesh, 1, 8)
    losses += training.iterate(2).losses
    registry = training.model.registry
    assert registry is not None
    return plain, losses, len(registry)


@pytest.mark.parametrize(
    "layers", [(), ("--first-last-layers-bf16", "--num-layers-at-end-in-bf16", "0")]
)
def test_evaluation_leaves_no_trace(te_ranks: Ranks, layers: tuple[str, ...]) -> None:
    plain, evaluated_losses, registered = run(te_ranks, evaluated, layers=layers)
    assert plain == evaluated_losses and plain[-1] < plain[0] and registered == 0


def test_stand_in_device_answers_as_te_does() -> None:
    for name in ("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available"):
        assert list(inspect.signature(getattr(_Device(9, 0), name)).parameters) == ["return_reason"]


def command_losses(folder: Path, flags: tuple[str, ...]) -> list[float]:
    """Losses of a run of the command line, on whatever device is there."""
    command = (*PARITY, *BLOCK_SIZES, *TE, *flags, "--train-iters", "5", "--run-dir", str(folder))
    subprocess.run(
        [sys.executable, "pretrain_gpt.py", *command], cwd=ROOT, check=True, timeout=PATIENCE_S
    )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CLASSES)
def test_recipe_trains_on_a_gpu(tmp_path: Path, name: str) -> None:
    usable, reason = availability.available(name)
    if not usable:
        pytest.skip(reason)
    wanted = command_losses(tmp_path / "bf16", ("--fp8-format", "none"))
    found = command_losses(tmp_path / name, ("--fp8-recipe", name))
    assert len(found) == len(wanted) == 5 and found != wanted
    for ours, theirs in zip(found, wanted, strict=True):
        assert abs(ours / theirs - 1) < 0.03
