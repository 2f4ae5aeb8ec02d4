"""Training with recipes that keep no scale state, and with one window entry per micro-batch."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.data.gpt_dataset import MockGPTDataset
from megafp8.data.loader import BatchLoader
from megafp8.evaluation import validation_loss
from megafp8.numerics import compute_amax
from megafp8.train.state import TrainState
from tests.model.small import (
    VOCAB,
    Run,
    assert_same_bytes,
    one_rank,  # noqa: F401
    small_config,
    start_run,
)
from tests.support.states import load_state, save_state
from tests.train.test_fp8_state import assert_same_traces, fp8_linears, merged, trace

pytestmark = pytest.mark.usefixtures("one_rank")
# The smallest sizes whose linears fit blocks of 32, and of 128.
SIZES = {"mxfp8": {}, "tensorwise": {}, "rowwise": {}, "rowwise_with_gw_hp": {}}
SIZES["blockwise"] = {
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "kv_channels": 32,
    "num_query_groups": 2,
    "seq_length": 64,
    "num_layers": 1,
}
EACH = pytest.mark.parametrize("recipe", SIZES)


def changes(recipe: str) -> dict[str, Any]:
    fmt = "hybrid" if recipe == "tensorwise" else "e4m3"
    return {"fp8_recipe": recipe, "fp8_format": fmt, "fp8_amax_history_len": None, **SIZES[recipe]}


def config_of(recipe: str, **more: Any):
    return small_config(bf16=True, clip_grad=0.0, lr=1e-2, **{**changes(recipe), **more})


@EACH
def test_recompute_and_kept_weights_change_no_bit(recipe: str) -> None:
    plain = trace(**changes(recipe))
    assert not [name for name in plain[-1] if name.startswith("fp8.")], "no scale state"
    assert_same_traces(trace(**changes(recipe), recompute_granularity="full"), plain)
    assert_same_traces(trace(cache=False, **changes(recipe)), plain)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_two_stages_equal_one(ranks, recipe: str) -> None:
    plain = [dict(sorted(step.items())) for step in trace(**changes(recipe))]
    answers = ranks.run(trace, world_size=2, pipeline_model_parallel_size=2, **changes(recipe))
    assert_same_traces(merged(answers), plain)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_gathers_in_fp8_and_in_bf16_give_the_same_bits(ranks, recipe: str) -> None:
    """A rank's own casts put together are the casts of the whole: one scale, or own blocks."""
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, **changes(recipe)}
    if recipe == "mxfp8":
        layout["seq_length"] = 32  # 32 tokens on each rank
        layout["hidden_size"], layout["ffn_hidden_size"] = 64, 64
    traces = [
        ranks.run(trace, world_size=2, **layout, fp8_tp_comm=which)
        for which in ("none", "all-gather")
    ]
    for first, second in zip(*traces, strict=True):
        assert_same_traces(first, second)


@EACH
def test_resume_and_evaluation_leave_no_trace(recipe: str, tmp_path: Path) -> None:
    config = config_of(recipe)
    run, other = start_run(config), start_run(config)
    run.train(range(2))
    path = save_state(tmp_path, TrainState(2, 16), run.step, VOCAB)
    load_state(path, other.step)
    loader = BatchLoader(
        MockGPTDataset(config.model.seq_length, VOCAB, 1, split="valid"),
        config.model.seq_length,
        2,
    )
    before = run.state()
    assert 3.0 < validation_loss(run.model, loader, run.mesh, 2, 8) < 7.0
    assert_same_bytes(run.state(), before)
    assert run.train(range(2, 4)) == other.train(range(2, 4))
    assert_same_bytes(run.state(), other.state())


@EACH
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_input_skips_the_step_and_is_named(
    recipe: str, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    """With the loss and the gradients that inf leaves, or without: the cast would hide it."""
    run = start_run(config_of(recipe))
    before = run.shards()
    linear = list(fp8_linears(run).values())[-1]

    def spoil(module, args):
        x = args[0].clone()
        x.view(-1)[3] = bad
        return (x,)

    handle = linear.register_forward_pre_hook(spoil)
    with caplog.at_level("WARNING"):
        (result,) = run.train(range(1))
    handle.remove()
    assert result.skipped
    assert_same_bytes(run.shards(), before)
    assert not run.train(range(1, 2))[0].skipped


@pytest.mark.parametrize("gathered", [False, True], ids=["gathered-bf16", "gathered-fp8"])
@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_a_weight_that_became_infinite_is_no_largest_fp8_number(
    name: str, gathered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The cast would hide it: loss and gradients stay finite."""
    values = {"fp8_recipe": name, "fp8_format": "hybrid", "fp8_param_gather": gathered}
    run = start_run(small_config(bf16=True, clip_grad=0.0, lr=1e-2, **values))
    shards = {entry.name: entry.shard for entry in run.step.gradients.entries}
    shard = shards["decoder.layers.0.mlp.linear_fc1.weight"]
    good = shard.view(-1)[3].clone()
    shard.view(-1)[3] = math.inf
    run.step.scales.refresh_weights()  # as after a load
    before = run.shards()
    with caplog.at_level("WARNING"):
        (result,) = run.train(range(1))
    assert result.skipped and "decoder.layers.0.mlp.linear_fc1 (FP8 weight)" in caplog.text
    assert_same_bytes(run.shards(), before)
    shard.view(-1)[3] = good
    run.step.scales.refresh_weights()
    assert not run.train(range(1, 2))[0].skipped


def window_run(**more: Any) -> Run:
    values = {"fp8_amax_window": "micro-batch", "fp8_amax_history_len": 16, **more}
    config = small_config(bf16=True, fp8_format="hybrid", clip_grad=0.0, lr=1e-2, **values)
    return start_run(config)


def test_one_entry_for_each_micro_batch_and_scales_that_move_within_a_step() -> None:
    run = window_run()
    registry = run.model.registry
    assert registry is not None
    name, linear = next(iter(fp8_linears(run).items()))
    index = {role: registry.index_of(name, role) for role in ("input", "weight")}
    seen: list[tuple[float, float]] = []
    linear.register_forward_pre_hook(
        lambda module, args: seen.append(
            (float(compute_amax(args[0])), float(registry.scale[index["input"]]))
        )
    )
    run.train(range(2))
    amaxes, scales = zip(*seen, strict=True)
    assert len(amaxes) == 2 * 4, "four micro-batches a step"
    assert registry.amax_history[-8:, index["input"]].tolist() == list(amaxes)
    assert not registry.amax_history[:-8, index["input"]].any()
    # Each cast with what was known before its own micro-batch.
    wanted = [1.0] + [float(torch.tensor(448.0) / max(amaxes[:n])) for n in range(1, 8)]
    assert list(scales) == wanted
    # A weight changes once a step, and has one entry for it.
    assert int((registry.amax_history[:, index["weight"]] > 0).sum()) == 2


def test_one_micro_batch_a_step_is_the_window_of_steps() -> None:
    runs = [
        window_run(micro_batch_size=8, fp8_amax_window=kind) for kind in ("step", "micro-batch")
    ]
    assert runs[0].train(range(3)) == runs[1].train(range(3))
    assert_same_bytes(runs[0].state(), runs[1].state())


def test_a_skipped_step_puts_scales_back() -> None:
    run = window_run()
    run.train(range(2))
    before = {k: v for k, v in run.state().items() if not k.startswith("registry.")}
    calls: list[int] = []
    linear = list(fp8_linears(run).values())[-1]

    def spoil(module, args):
        calls.append(1)
        return (torch.full_like(args[0], math.inf) if len(calls) == 2 else args[0],)

    handle = linear.register_forward_pre_hook(spoil)
    (result,) = run.train(range(2, 3))
    handle.remove()
    assert result.skipped and len(calls) == 4
    found = run.state()
    assert_same_bytes({name: found[name] for name in before}, before)
    registry = run.model.registry
    assert registry is not None
    assert torch.equal(registry.scale_inv, registry.scale.reciprocal())
    assert not run.train(range(3, 4))[0].skipped
