"""One scale state for a whole step: micro-batches, recompute, cached weights, stages, loading.

`trace` trains three steps and returns, per step, losses, the gradients the optimizer was given, and
all masters, moments, scales and windows. Clipping is off: the order in which squares of gradients
are added depends on the layout, their values do not.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.data.gpt_dataset import MockGPTDataset
from megafp8.data.loader import BatchLoader
from megafp8.evaluation import validation_loss
from megafp8.layers.native.linear import NativeLinear
from megafp8.train.state import TrainState
from tests.model.small import (
    FP8,
    LLAMA,
    VOCAB,
    Run,
    assert_same_bytes,
    kept_gradients,
    micro_batches,
    one_rank,  # noqa: F401
    registry_state,
    small_config,
    start_run,
)
from tests.support.states import load_state, save_state

STEPS = 3
BASE: dict[str, Any] = {**FP8, "clip_grad": 0.0, "lr": 1e-2}


def fp8_linears(run: Run) -> dict[str, NativeLinear]:
    return {
        module.options.name: module
        for stage in run.model.stages
        for module in stage.modules()
        if isinstance(module, NativeLinear) and module.precision == "fp8"
    }


def trace(cache: bool | None = None, **changes: Any) -> list[dict[str, Tensor]]:
    """Per step: loss, gradients, state. `cache` overrides whether linears keep FP8 weights."""
    run = start_run(small_config(**{**BASE, **changes}))
    if cache is not None:
        for linear in fp8_linears(run).values():
            linear.operands.keeps_weight = cache
    steps = []
    with kept_gradients(run) as gradients:
        for iteration in range(STEPS):
            result = run.train(range(iteration, iteration + 1))[0]
            assert not result.skipped
            found = {f"gradient.{name}": value for name, value in gradients[-1].items()}
            found |= run.state()
            # Weights whose cast is kept; the counters in it belong to the rank's own registry.
            found = {k: v for k, v in found.items() if not k.startswith("registry.")}
            steps.append(found | {"loss": torch.tensor(result.loss)})
    return steps


def merged(answers: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """Pipeline ranks hold different parameters: put them together, step by step."""
    return [
        dict(sorted({**first, **second}.items())) for first, second in zip(*answers, strict=True)
    ]


def assert_same_traces(found: list[dict[str, Tensor]], wanted: list[dict[str, Tensor]]) -> None:
    assert len(found) == len(wanted) == STEPS
    for step, (left, right) in enumerate(zip(found, wanted, strict=True)):
        try:
            assert_same_bytes(left, right)
        except AssertionError as error:
            raise AssertionError(f"step {step}: {error}") from None


@pytest.fixture(scope="module")
def plain(one_rank: None) -> list[dict[str, Tensor]]:  # noqa: F811
    """One rank, four micro-batches, nothing recomputed, FP8 weights kept over the step."""
    found = trace()
    scales = [value for key, value in found[-1].items() if key.endswith(".scale")]
    assert len(scales) == 8 * 3 and all(scale != 1.0 for scale in scales)
    return found


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute_changes_no_bit(plain, granularity):
    assert_same_traces(trace(recompute_granularity=granularity), plain)


def test_recompute_of_some_layers_changes_no_bit(plain):
    found = trace(recompute_granularity="full", recompute_num_layers=1)
    assert_same_traces(found, plain)


def test_recompute_really_runs_the_forward_again(monkeypatch):
    import megafp8.layers.native.operands as operands

    calls: list[int] = []
    original = operands.fprop
    monkeypatch.setattr(operands, "fprop", lambda x, w: calls.append(1) or original(x, w))
    counts = []
    for granularity in (None, "full"):
        calls.clear()
        run = start_run(small_config(**BASE, recompute_granularity=granularity))
        run.train(range(1))
        counts.append(len(calls))
    assert counts == [8 * 4, 2 * 8 * 4]


@pytest.mark.usefixtures("one_rank")
def test_weight_cache_changes_no_bit(plain):
    assert_same_traces(trace(cache=False), plain)
    assert_same_traces(trace(cache=False, recompute_granularity="full"), plain)


def test_kept_weights_are_those_cast_after_each_gather(ranks):
    """FSDP on two ranks: parameters freed after the forward (cast twice a step), or kept."""
    traces = [
        ranks.run(trace, world_size=2, reshard_after_forward=reshard, global_batch_size=4)
        for reshard in (True, False)
    ]
    for freed, kept in zip(*traces, strict=True):
        assert_same_traces(freed, kept)


def test_two_stages_equal_one(ranks, plain):
    for changes in ({}, {"recompute_granularity": "full"}, {"pipeline_schedule": "gpipe"}):
        answers = ranks.run(trace, world_size=2, pipeline_model_parallel_size=2, **changes)
        assert_same_traces(merged(answers), [dict(sorted(step.items())) for step in plain])


@pytest.mark.usefixtures("one_rank")
def test_one_micro_batch_or_four(plain):
    """Windows and scales are bit-equal: an entry is the maximum over the step's samples.

    Gradients are not: each micro-batch's weight gradient is rounded to bf16 before it is added.
    So windows of weights differ after the first step, and everything after the second.
    """
    whole, parts = trace(micro_batch_size=8)[0], plain[0]
    assert float(whole["loss"]) == pytest.approx(float(parts["loss"]), rel=1e-6)
    states = [name for name in parts if name.startswith("fp8.") and ".weight." not in name]
    assert len(states) == 8 * 2 * 2
    assert_same_bytes({n: whole[n] for n in states}, {n: parts[n] for n in states})
    for name in (name for name in parts if name.startswith("gradient.")):
        error = (whole[name] - parts[name]).norm() / parts[name].norm()
        assert error < 2**-8, (name, float(error))


def step_with_amaxes(run: Run, iteration: int) -> dict[tuple[str, str], list[float]]:
    """Train one step; every amax seen by hooks outside of the FP8 code, in order."""
    seen: dict[tuple[str, str], list[float]] = {}
    handles = []

    def note(name: str, role: str, tensor: Tensor) -> None:
        seen.setdefault((name, role), []).append(float(tensor.detach().float().abs().max()))

    for name, linear in fp8_linears(run).items():

        def before(module, args, name=name):
            note(name, "input", args[0])

        def after(module, args, output, name=name):
            if output.requires_grad:
                output.register_hook(lambda grad: note(name, "grad_output", grad))

        handles += [linear.register_forward_pre_hook(before), linear.register_forward_hook(after)]
    run.train(range(iteration, iteration + 1))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("granularity", [None, "full"])
def test_one_entry_per_tensor_and_step(granularity):
    """Each the maximum over four micro-batches; with recompute, inputs are seen twice as often."""
    run = start_run(small_config(**BASE, recompute_granularity=granularity))
    registry = run.model.registry
    assert registry is not None
    for iteration in range(STEPS):
        before = registry.amax_history.clone()
        seen = step_with_amaxes(run, iteration)
        assert torch.equal(registry.amax_history[:-1], before[1:]), "rolled by exactly one"
        masters = run.shards()
        for index, (module, role) in enumerate(registry.keys):
            if role == "weight":
                wanted = float(masters[f"{module}.weight"].abs().max())
            else:
                amaxes = seen[module, role]
                times = 2 if granularity == "full" and role == "input" else 1
                assert len(amaxes) == 4 * times and len(set(amaxes)) > 1
                wanted = max(amaxes)
            window = registry.amax_history[:, index]
            assert float(window[-1]) == wanted, (module, role)
            assert int((window > 0).sum()) == iteration + 1
            fmax = 57344.0 if role == "grad_output" else 448.0
            # `max` over the window so far, in fp32.
            assert float(registry.scale[index]) == float(torch.tensor(fmax) / window.max())


@pytest.mark.usefixtures("one_rank")
def test_window_rolls_off():
    run = start_run(small_config(**{**BASE, "fp8_amax_history_len": 2}))
    run.train(range(3))
    registry = run.model.registry
    assert registry is not None and registry.amax_history.shape[0] == 2
    assert (registry.amax_history > 0).all()


def forward(run: Run, iteration: int = 9) -> Tensor:
    """Logits without a trace in the scale state."""
    batch = micro_batches(run, iteration)[0]
    (stage,) = run.model.stages
    assert run.model.registry is not None
    with torch.no_grad(), run.model.registry.paused():
        return stage(batch["tokens"], batch["position_ids"], batch["seed"])


@pytest.mark.usefixtures("one_rank")
def test_weights_are_cast_anew_after_a_step_and_after_loading(tmp_path: Path):
    config = small_config(**BASE)
    run = start_run(config)
    first = forward(run)  # fills the cache with the initial weights
    run.train(range(2))
    trained = forward(run)
    assert not torch.equal(first, trained)
    path = save_state(tmp_path, TrainState(2, 16), run.step, VOCAB)

    other = start_run(config)
    assert torch.equal(forward(other), first)
    state = load_state(path, other.step)
    assert (state.iteration, state.consumed_samples) == (2, 16)
    # The very first forward after loading uses loaded weights with loaded scales.
    assert torch.equal(forward(other), trained)
    registry = other.model.registry
    assert registry is not None
    assert torch.allclose(registry.scale * registry.scale_inv, torch.ones(24), atol=2**-23, rtol=0)
    for linear in fp8_linears(other).values():
        cast = linear.operands._cached[1]
        assert (
            cast.scale_inv.data_ptr()
            != registry.scale_inv_of(linear.operands.index["weight"]).data_ptr()
        ), "the scale of the cast is kept, not a view of the moving one"
    assert_same_bytes(other.state(), run.state())
    assert other.train(range(2, 3)) == run.train(range(2, 3))
    assert_same_bytes(other.state(), run.state())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_dropout": 0.1},
        {"recompute_granularity": "full"},
        {"fp8_weight_amax": "cast"},  # a cast kept from evaluation would go unrecorded
    ],
)
def test_evaluation_leaves_no_trace(changes):
    """State and everything after it are those of a run that never evaluated."""
    config = small_config(**BASE, **changes)
    runs = [start_run(config), start_run(config)]
    loader = BatchLoader(MockGPTDataset(16, VOCAB, 1, split="valid"), 16, 2)
    for run, evaluates in zip(runs, (True, False), strict=True):
        run.train(range(2))
        if evaluates:
            registry = run.model.registry
            assert registry is not None
            before, version = run.state(), registry.version
            loss = validation_loss(run.model, loader, run.mesh, 2, 8)
            assert 4.0 < loss < 5.2
            assert_same_bytes(run.state(), before)
            assert registry.version == version and registry.recording
            assert all(stage.training for stage in run.model.stages)
    assert runs[0].train(range(2, 4)) == runs[1].train(range(2, 4))
    assert_same_bytes(runs[0].state(), runs[1].state())


def test_gathers_in_fp8_and_in_bf16_give_the_same_bits(ranks):
    """What is gathered is the cast, or what is cast is the gathered: one scale, the same codes."""
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    traces = [
        ranks.run(trace, world_size=2, **layout, fp8_tp_comm=which)
        for which in ("none", "all-gather")
    ]
    for first, second in zip(*traces, strict=True):
        assert_same_traces(first, second)


def test_high_precision_weight_gradients_train(ranks, plain):
    """--no-fp8-wgrad on one rank, and with gathered operands on two: the loss curve stays."""
    single = trace(fp8_wgrad=False)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    double = ranks.run(trace, world_size=2, **layout, fp8_wgrad=False)
    name = "gradient.decoder.layers.0.mlp.linear_fc2.weight"
    assert not torch.equal(single[0][name], plain[0][name])
    assert torch.equal(single[0]["loss"], plain[0]["loss"]), "the first forward is the same"
    for step in range(STEPS):
        assert float(single[step]["loss"]) == pytest.approx(float(plain[step]["loss"]), rel=1e-2)
        assert float(double[0][step]["loss"]) == pytest.approx(
            float(single[step]["loss"]), rel=1e-3
        )


@pytest.mark.usefixtures("one_rank")
def test_registry_holds_one_scale_for_each_role_of_each_linear():
    run = start_run(small_config(LLAMA, **FP8))
    registry = run.model.registry
    assert registry is not None
    assert len(registry) == 3 * len(fp8_linears(run)) == 24
    assert {role for _, role in registry.keys} == {"input", "weight", "grad_output"}
    assert set(registry_state(registry)) >= {
        f"fp8.{module}.{role}.scale" for module, role in registry.keys
    }
