"""What TransformerEngine does by itself, and that none of it reaches a run.

Each test shows the trap in stock TE first, where there is something to show.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.evaluation import validation_loss
from megafp8.layers import LinearOptions
from megafp8.layers.native import NativeBackend
from tests.model.small import FP8, GPT2, layer_context, registry_state, small_config
from tests.support import te_cpu
from tests.support.layouts import PARITY, degrees
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL, start_te

NAME = "decoder.layers.0.self_attention.linear_qkv"
ALONE = (*PARITY, *SMALL, *degrees())


def run(te_ranks: Ranks, function: Any, **kwargs: Any) -> Any:
    return te_ranks.run(function, world_size=1, **kwargs)[0]


def stock(te: Any, **changes: Any) -> Any:
    """A plain te.Linear in bf16, and a recipe with a window of 4."""
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    linear = te.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="cpu", **changes)
    return linear, DelayedScaling(amax_history_len=4)


def passes(te: Any, linear: Any, recipe: Any, count: int = 1, grad: bool = True) -> None:
    for _ in range(count):
        x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=grad)
        with torch.set_grad_enabled(grad), te.autocast(enabled=True, recipe=recipe):
            y = linear(x)
        if grad:
            y.sum().backward()


# ---------------------------------------------------------------------- evaluation, micro-batches


def stock_evaluation() -> tuple[float, float]:
    te = te_cpu.load()
    linear, recipe = stock(te)
    passes(te, linear, recipe)
    before = float(linear.fp8_meta["scaling_fwd"].amax_history[0, 0])
    passes(te, linear, recipe, grad=False)
    return before, float(linear.fp8_meta["scaling_fwd"].amax_history[0, 0])


def evaluation() -> tuple[bool, bool, float]:
    training = start_te(ALONE)
    training.iterate(2)
    registry = training.model.registry
    assert registry is not None
    before = registry_state(registry)
    loss = validation_loss(training.model, training.loader, training.mesh, 1, 8)
    after = registry_state(registry)
    clean = all(torch.equal(before[key], after[key]) for key in before)
    # Outside `paused`, the same pass is recorded: the test would see a trace.
    training.model.runner.evaluate(training.micro_batches())
    return clean, bool(registry.pending_amax.any()), loss


def test_evaluation_leaves_no_trace(te_ranks: Ranks) -> None:
    before, after = run(te_ranks, stock_evaluation)
    assert before == 0.0 < after  # TE stages the amax of a pass without gradients
    clean, seen, loss = run(te_ranks, evaluation)
    assert clean and seen and 0 < loss < 10


def stock_micro_batches() -> int:
    te = te_cpu.load()
    linear, recipe = stock(te)
    passes(te, linear, recipe, count=3)
    return int((linear.fp8_meta["scaling_fwd"].amax_history[:, 0] > 0).sum())


def entries_after_a_step() -> tuple[int, list[int], int]:
    te_cpu.load()
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()  # what stock modules of other tests left
    training = start_te(ALONE)
    count = len(training.micro_batches())
    training.iterate(1)
    registry = training.model.registry
    assert registry is not None
    buffers = FP8GlobalStateManager.quantization_state.global_amax_buffer
    return count, (registry.amax_history > 0).sum(0).tolist(), len(buffers)


def test_window_counts_optimizer_steps(te_ranks: Ranks) -> None:
    assert run(te_ranks, stock_micro_batches) == 3  # TE rolls once per micro-batch
    count, entries, buffers = run(te_ranks, entries_after_a_step)
    assert count == 4 and set(entries) == {1} and len(entries) == 2 * 4 * 3
    assert buffers == 0  # nothing for TE's own update to reduce or to move


# -------------------------------------------------------------------------- micro-batch and weight


def stock_first_micro_batch(flag: bool | None) -> list[float]:
    te = te_cpu.load()
    linear, recipe = stock(te, fuse_wgrad_accumulation=True)
    linear.weight.main_grad = torch.full((32, 32), 100.0)
    x = torch.ones(16, 32, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=True, recipe=recipe):
        y = linear(x, is_first_microbatch=flag)
    y.sum().backward()
    return linear.weight.main_grad[0, :1].tolist()


def accumulated() -> tuple[Tensor, Tensor, int]:
    """Gradients of two micro-batches: one after the other, and the sum of single ones."""
    te_cpu.load()
    from megafp8.layers.transformer_engine.backend import TransformerEngineBackend
    from tests.support.te_cpu.emulation import CALLS

    config = small_config(GPT2, **FP8, disable_bias_linear=True)
    context = layer_context(config, cache_weights=False)
    backend = TransformerEngineBackend(context.recipe, context.mesh)
    linear: Any = backend.linear(context, LinearOptions(NAME, "column", True, False))
    linear.to(torch.bfloat16)
    assert context.registry is not None
    context.registry.finalize("cpu")
    batches = [torch.randn(16, 1, 32).bfloat16() for _ in range(2)]

    def gradient(inputs: list[Tensor]) -> Tensor:
        linear.weight.grad = None
        for x in inputs:
            with backend.scope():
                linear(x.clone().requires_grad_(True)).sum().backward()
        return linear.weight.grad.to_local().float()

    together = gradient(batches)
    CALLS.clear()
    single = [gradient([x]) for x in batches]
    return together, (single[0].bfloat16() + single[1].bfloat16()).float(), CALLS["Float8Quantizer"]


def test_first_micro_batch_flag_is_not_used(te_ranks: Ranks) -> None:
    """True overwrites a fused gradient and False takes a stale weight; None does neither."""
    assert run(te_ranks, stock_first_micro_batch, flag=True) == [16.0]
    assert run(te_ranks, stock_first_micro_batch, flag=None) == [116.0]
    together, summed, casts = run(te_ranks, accumulated)
    assert torch.equal(together, summed) and together.any()
    assert casts == 2 * 3  # input, weight and grad_output of each of two micro-batches


# -------------------------------------------------------------------------------- recipes, pickles


def stock_pickle() -> tuple[str, list[str], list[str]]:
    te = te_cpu.load()
    linear, recipe = stock(te)
    passes(te, linear, recipe)
    state = linear.get_extra_state()
    try:
        linear.set_extra_state(state)
        said = ""
    except RuntimeError as error:
        said = str(error)
    training = start_te(ALONE)
    training.iterate(1)
    names = [name for stage in training.model.stages for name in stage.state_dict()]
    return said, list(linear.state_dict()), names


def test_no_pickle_is_written_or_read(te_ranks: Ranks) -> None:
    said, stock_names, ours = run(te_ranks, stock_pickle)
    assert "pickle" in said.lower() and "_extra_state" in stock_names
    assert ours and not any("extra_state" in name for name in ours)


def unknown_keywords() -> tuple[bool, str, dict[str, Any]]:
    te_cpu.load()
    from transformer_engine.common.recipe import DelayedScaling

    from megafp8.errors import PrecisionError
    from megafp8.layers.transformer_engine.recipes import checked, te_recipe
    from megafp8.numerics import Recipe

    swallowed = not hasattr(DelayedScaling(interval=1), "interval")  # type: ignore[call-arg]
    try:
        checked(DelayedScaling, interval=1)
        said = ""
    except PrecisionError as error:
        said = str(error)
    made: Any = te_recipe(Recipe())
    return swallowed, said, {"format": made.fp8_format.name, "reduce": made.reduce_amax}


def test_unknown_recipe_keywords_are_refused(te_ranks: Ranks) -> None:
    swallowed, said, made = run(te_ranks, unknown_keywords)
    assert swallowed and "DelayedScaling has no field interval; its fields are amax_" in said
    assert made == {"format": "HYBRID", "reduce": True}


def stock_after_bf16() -> int:
    te = te_cpu.load()
    linear, recipe = stock(te)
    passes(te, linear, recipe)
    with torch.no_grad(), warnings.catch_warnings():
        linear(torch.randn(16, 32, dtype=torch.bfloat16))
    return linear.get_extra_state().numel()


def after_bf16() -> tuple[bool, bool]:
    """Scale state before and after a pass in which TE's FP8 is off."""
    training = start_te((*ALONE, "--no-te-fused-norms"))  # te.Linear alone
    training.iterate(2)
    import transformer_engine.pytorch as te

    registry = training.model.registry
    assert registry is not None
    before = registry.tensors()
    linears = [m for stage in training.model.stages for m in stage.modules() if _is_fp8(m)]
    for linear in linears:
        with torch.no_grad(), te.autocast(enabled=False):
            te.Linear.forward(linear, torch.randn(16, 1, linear.in_features))
    after = registry.tensors()
    kept = all(torch.equal(before[key], after[key]) for key in before)
    training.iterate(1)
    moved = registry.tensors()
    return kept and len(linears) == 8, any(not torch.equal(moved[k], before[k]) for k in before)


def _is_fp8(module: Any) -> bool:
    return bool(getattr(getattr(module, "options", None), "fp8", False)) and hasattr(
        module, "fp8_meta"
    )


def test_a_bf16_forward_before_a_save_loses_nothing(te_ranks: Ranks) -> None:
    assert run(te_ranks, stock_after_bf16) == 0  # TE's state is empty then
    kept, moved = run(te_ranks, after_bf16)
    assert kept and moved


# ------------------------------------------------------------------------------- BF16 layers, scope


def block_outputs(fp8: bool, layer: int) -> tuple[list[Tensor], list[float], int]:
    """What the linears of a block give for fixed inputs, and a run's losses."""
    layers = ("--first-last-layers-bf16",) if fp8 else ("--fp8-format", "none")
    flags = (*PARITY, "--num-layers", "4", "--global-batch-size", "8", *degrees(), *layers)
    training = start_te(flags)
    (stage,) = training.model.stages
    stage.unshard()
    block: Any = stage.decoder.layers[str(layer)]
    block.unshard()
    outputs = []
    attention, mlp = block.self_attention, block.mlp
    for linear in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
        generator = torch.Generator().manual_seed(linear.in_features)
        x = torch.randn(16, 1, linear.in_features, generator=generator).bfloat16()
        with training.model.scope(), torch.no_grad():
            outputs.append(linear(x))
    losses = start_te(flags).iterate(4).losses
    registry = training.model.registry
    return outputs, losses, 0 if registry is None else len(registry)


def test_bf16_layers_in_a_delayed_scaling_run(te_ranks: Ranks) -> None:
    """First and last block in BF16 give the very outputs of a BF16 model; the run trains."""
    for layer in (0, 3):
        mixed, losses, tensors = run(te_ranks, block_outputs, fp8=True, layer=layer)
        plain, _, none = run(te_ranks, block_outputs, fp8=False, layer=layer)
        assert len(mixed) == 4 and all(map(torch.equal, mixed, plain))
        assert losses[-1] < losses[0] and tensors == 2 * 4 * 3 and none == 0
    mixed, *_ = run(te_ranks, block_outputs, fp8=True, layer=1)
    plain, *_ = run(te_ranks, block_outputs, fp8=False, layer=1)
    assert not any(map(torch.equal, mixed, plain))  # that one is FP8


def policy_run(policy: str) -> tuple[list[float], list[str]]:
    training = start_te((*ALONE, "--precision-policy", policy))
    losses = training.iterate(4).losses
    registry = training.model.registry
    assert registry is not None
    return losses, sorted({name for name, _ in registry.keys})


def test_bf16_layers_by_name(te_ranks: Ranks, tmp_path: Any) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("exclude: ['*.mlp.linear_fc2']\n")
    losses, names = run(te_ranks, policy_run, policy=str(policy))
    assert losses[-1] < losses[0]
    assert len(names) == 6 and not any(name.endswith("linear_fc2") for name in names)


def outside_a_scope() -> str:
    te_cpu.load()
    from megafp8.layers.transformer_engine.backend import TransformerEngineBackend

    context = layer_context(small_config(GPT2, **FP8))
    backend = TransformerEngineBackend(context.recipe, context.mesh)
    linear = backend.linear(context, LinearOptions(NAME, "column", True, False))
    try:
        linear(torch.randn(16, 1, 32))
    except AssertionError as error:
        return str(error)
    return ""


def test_an_fp8_layer_outside_a_scope_is_no_quiet_bf16(te_ranks: Ranks) -> None:
    assert run(te_ranks, outside_a_scope) == f"{NAME}: outside a scope"


def test_native_scope_is_empty() -> None:
    with NativeBackend().scope() as scope:
        assert scope is None


@pytest.mark.parametrize("value", ["high_precision"])
def test_backward_override_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from megafp8.errors import PrecisionError
    from megafp8.layers.transformer_engine.availability import import_te

    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", value)
    with pytest.raises(PrecisionError, match="NVTE_BACKWARD_OVERRIDE is high_precision"):
        import_te()
