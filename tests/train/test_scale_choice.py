"""Scales that a run starts with: of its own rule after a load, of the masters where there is none.

A scale is its window under a rule, and windows are what a run loads. Formulas here are plain ones.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.numerics import ScaleRegistry
from megafp8.train.state import TrainState
from tests.model.small import (
    FP8,
    VOCAB,
    Run,
    assert_same_bytes,
    kept_gradients,
    one_rank,  # noqa: F401
    small_config,
    start_run,
)
from tests.support.states import load_state, save_state

STEPS = 4
SAVED: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "e4m3": {"fp8_format": "e4m3"},
    "capped": {"fp8_scale_cap": 16.0},
    "powers": {"fp8_power_of_2_scales": True, "fp8_margin": 2},
}


@pytest.fixture(scope="module")
def saved(
    one_rank: None,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """Checkpoint and state of a short run, made once for each setting."""
    made: dict[str, tuple[Path, dict[str, Tensor]]] = {}

    def get(name: str) -> tuple[Path, dict[str, Tensor]]:
        if name not in made:
            config = small_config(**{**FP8, "lr": 0.05, **SAVED[name]})
            run = start_run(config)
            run.train(range(STEPS))
            root = tmp_path_factory.mktemp(name)
            state = TrainState(STEPS, 8 * STEPS)
            made[name] = (
                save_state(root, state, run.step, VOCAB),
                {key: value for key, value in run.state().items() if key.startswith("fp8.")},
            )
        return made[name]

    return get


def resumed(path: Path, **changes: Any) -> Run:
    config = small_config(**{**FP8, "lr": 0.05, **changes})
    run = start_run(config)
    load_state(path, run.step)
    return run


def registry_of(run: Run) -> ScaleRegistry:
    assert run.model.registry is not None
    return run.model.registry


def expected(registry: ScaleRegistry, saved: dict[str, Tensor]) -> list[float]:
    """The rule of scales on the saved windows, entry by entry in fp32."""
    recipe, scales = registry.recipe, []
    for module, role in registry.keys:
        window = saved[f"fp8.{module}.{role}.amax_history"]
        entries = window[window > 0][-recipe.amax_history_len :]
        assert len(entries) == min(STEPS, recipe.amax_history_len)
        amax = entries[-1] if recipe.amax_compute_algo == "most_recent" else entries.max()
        largest = (
            57344.0 if role == "grad_output" and recipe.gradient_format.name == "e5m2" else 448
        )
        scale = torch.tensor(largest) / amax / 2.0**recipe.margin
        scale = min(float(scale), recipe.scale_cap or float("inf"))
        if recipe.power_of_2_scales:
            scale = 2.0 ** (torch.tensor(scale).frexp().exponent.item() - 1)
        scales.append(scale)
    return scales


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("hybrid", {"fp8_format": "e4m3"}),
        ("e4m3", {}),
        ("hybrid", {"fp8_margin": 3}),
        ("hybrid", {"fp8_scale_cap": 20.0}),
        ("capped", {}),
        ("hybrid", {"fp8_amax_history_len": 1}),
        ("hybrid", {"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "most_recent"}),
        ("hybrid", {"fp8_power_of_2_scales": True}),
        ("powers", {"fp8_nonfinite_amax": "freeze", "fp8_amax_window": "micro-batch"}),
        ("powers", {"fp8_format": "e4m3", "fp8_weight_amax": "cast"}),
    ],
    ids=str,
)
def test_a_load_chooses_scales_by_the_runs_own_rule(saved, caplog, before, now):  # noqa: F811
    path, state = saved(before)
    with caplog.at_level(logging.INFO, logger="megafp8"):
        run = resumed(path, **now)
    registry = registry_of(run)
    assert registry.scale.tolist() == expected(registry, state)
    stored = [float(state[f"fp8.{module}.{role}.scale"]) for module, role in registry.keys]
    moved = sum(a != b for a, b in zip(registry.scale.tolist(), stored, strict=True))
    assert moved > 0
    assert f"{moved} FP8 scales are chosen anew, by this run's formats and rule" in caplog.text
    product = registry.scale * registry.scale_inv
    assert torch.allclose(product, torch.ones_like(product), atol=2**-23, rtol=0)
    # The windows are as they were, and go on from there.
    assert torch.equal(
        registry.amax_history[-1],
        torch.stack(
            [state[f"fp8.{module}.{role}.amax_history"][-1] for module, role in registry.keys]
        ),
    )
    assert not run.train(range(STEPS, STEPS + 1))[0].skipped


@pytest.mark.parametrize("name", SAVED)
def test_the_same_rule_keeps_every_bit(saved, caplog, name):  # noqa: F811
    path, state = saved(name)
    with caplog.at_level(logging.INFO, logger="megafp8"):
        run = resumed(path, **SAVED[name])
    assert_same_bytes(registry_of(run).tensors(), state)
    assert "scales" not in caplog.text


def test_the_first_gradients_after_a_change_of_format_do_not_saturate(saved):  # noqa: F811
    """E5M2's scale is 128 times too large for E4M3: gradients would be cut off for a step."""
    path, _ = saved("hybrid")
    norms = []
    for changes in ({}, {"fp8_format": "e4m3"}):
        run = resumed(path, clip_grad=0.0, **changes)
        with kept_gradients(run) as gradients:
            run.train(range(STEPS, STEPS + 1))
        norms.append(torch.stack([g.norm() for g in gradients[-1].values()]))
    assert torch.allclose(norms[1], norms[0], rtol=0.1)


def test_a_stored_scale_that_does_not_fit_its_window_is_said(saved, caplog, monkeypatch):  # noqa: F811
    path, state = saved("hybrid")
    load = ScaleRegistry.load

    def stale(self: ScaleRegistry, loaded: dict[str, Tensor]) -> int:
        return load(
            self,
            {
                k: v * 2 if k.endswith("0.mlp.linear_fc2.input.scale") else v
                for k, v in loaded.items()
            },
        )

    monkeypatch.setattr(ScaleRegistry, "load", stale)
    run = resumed(path)
    assert_same_bytes(registry_of(run).tensors(), state)
    assert "1 FP8 scales did not fit their windows" in caplog.text


# ------------------------------------------------------------------------------ the first scales


def first_scales(run: Run) -> list[float]:
    """448 / max |master| for weights, 1.0 for all others."""
    masters = run.shards()
    return [
        float(torch.tensor(448.0) / masters[f"{module}.weight"].abs().max())
        if role == "weight"
        else 1.0
        for module, role in registry_of(run).keys
    ]


@pytest.mark.usefixtures("one_rank")
def test_weights_start_with_the_scale_of_their_masters(tmp_path):
    bf16 = small_config(bf16=True, lr=0.05)
    plain = start_run(bf16)
    plain.train(range(2))
    path = save_state(tmp_path, TrainState(2, 16), plain.step, VOCAB)
    fresh = start_run(small_config(**FP8))
    switched = resumed(path)
    for run in (fresh, switched):
        registry = registry_of(run)
        assert registry.scale.tolist() == first_scales(run)
        assert registry.scale_inv.tolist() == (1 / registry.scale).tolist()
        assert len(set(registry.scale.tolist())) == 8 + 1 and not registry.amax_history.any()
    assert first_scales(fresh) != first_scales(switched)
    fresh.train(range(1))
    assert ((registry_of(fresh).amax_history > 0).sum(dim=0) == 1).all()


@pytest.mark.usefixtures("one_rank")
def test_first_scales_follow_the_rule(caplog):
    rule = {"fp8_margin": 1, "fp8_scale_cap": 1000.0, "fp8_power_of_2_scales": True}
    run = start_run(small_config(**FP8, **rule))
    wanted = [
        min(2.0 ** (torch.tensor(s / 2).frexp().exponent.item() - 1), 512.0) if s != 1.0 else s
        for s in first_scales(run)
    ]
    assert registry_of(run).scale.tolist() == wanted
    # TransformerEngine's way knows an amax once the weight has been cast.
    assert (registry_of(start_run(small_config(**FP8, fp8_weight_amax="cast"))).scale == 1).all()


@pytest.mark.usefixtures("one_rank")
def test_a_step_leaves_no_weight_behind_the_other_tensors_windows(tmp_path):
    """A checkpoint of before the first step: its windows are empty, its masters are not."""
    config = small_config(**FP8)
    run = start_run(config)
    wanted = registry_of(run).tensors()
    path = save_state(tmp_path, TrainState(), run.step, VOCAB)
    assert_same_bytes(registry_of(resumed(path)).tensors(), wanted)
    other = registry_of(resumed(path, fp8_margin=2))
    assert other.scale.tolist() == [
        s if role != "weight" else s / 4
        for s, (_, role) in zip(first_scales(run), other.keys, strict=True)
    ]


@pytest.mark.usefixtures("one_rank")
def test_the_first_gradients_are_closer_to_those_of_bf16():
    """At scale 1 most of a fresh weight lies among E4M3's subnormals."""
    kept: dict[str, dict[str, Tensor]] = {}
    for name, changes in {
        "bf16": {"fp8_format": None, "fp8_amax_history_len": None},
        "masters": {},
        "one": {"fp8_weight_amax": "cast"},
    }.items():
        run = start_run(small_config(**{**FP8, "num_layers": 8, "clip_grad": 0.0, **changes}))
        with kept_gradients(run) as gradients:
            run.train(range(1))
        kept[name] = gradients[0]
    errors = {
        name: torch.stack(
            [(kept[name][k] - g).norm() / g.norm() for k, g in kept["bf16"].items()]
        ).median()
        for name in ("masters", "one")
    }
    assert errors["masters"] < 0.75 * errors["one"], errors
