"""TE's LayerNormLinear in place of a norm and the linear after it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.layers import LinearOptions, NormOptions
from megafp8.layers.native import NativeBackend
from megafp8.layers.native.norm import Norm
from megafp8.numerics import compute_amax
from megafp8.parallel.pipeline import DeferredWeightGradients
from tests.model.small import FP8, LLAMA, layer_context, randomize, registry_state, small_config
from tests.support import te_cpu
from tests.support.layouts import PARITY, degrees
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL, start_te, train

PAIRS = {
    "qkv": ("input_layernorm", "self_attention.linear_qkv"),
    "fc1": ("pre_mlp_layernorm", "mlp.linear_fc1"),
}
STEPS = 20


def make_pair(te: bool, kind: str, pair: str, bias: bool, fp8: bool = True) -> tuple[Any, ...]:
    """(backend, registry, norm, linear) of block 0 in bf16, parameters random."""
    if te:
        te_cpu.load(native_gemm=True)
        from megafp8.layers.transformer_engine.backend import TransformerEngineBackend
    style = {**LLAMA, "normalization": kind, "disable_bias_linear": not bias}
    context = layer_context(small_config(style, **(FP8 if fp8 else {"bf16": True})))
    backend: Any = TransformerEngineBackend(context.recipe, context.mesh) if te else NativeBackend()
    first, second = (f"decoder.layers.0.{name}" for name in PAIRS[pair])
    norm, linear = backend.norm_linear(
        context, NormOptions(first, kind, 1e-5), LinearOptions(second, "column", fp8, bias)
    )
    for module in (norm, linear):
        randomize({f"layernorm.{name}": p for name, p in module.named_parameters()})
        module.to(torch.bfloat16)
    if context.registry is not None:
        context.registry.finalize("cpu")
    return backend, context.registry, norm, linear


def states(te: bool, kind: str, pair: str, bias: bool = False) -> list[dict[str, Tensor]]:
    """Scale state, result and gradients after each step of a pair fed with recorded tensors."""
    backend, registry, norm, linear = make_pair(te, kind, pair, bias)
    assert isinstance(norm, Norm) and linear.options.mode == "column"
    parameters = {**dict(norm.named_parameters(prefix="norm"))}
    parameters |= dict(linear.named_parameters(prefix="linear"))
    weight = linear.weight.to_local().flatten(0, -2)
    generator = torch.Generator().manual_seed(3)
    found = []
    for step in range(STEPS):
        size = 10.0 ** (step * 7 % 5 - 2)
        x = (torch.randn(16, 2, 32, generator=generator) * size).bfloat16().requires_grad_()
        dy = torch.randn(16, 2, weight.shape[0], generator=generator).mul_(size).bfloat16()
        with backend.scope():
            y = linear(norm(x))
        y.backward(dy)
        assert x.grad is not None
        registry.record(registry.index_of(linear.options.name, "weight"), compute_amax(weight))
        registry.update()
        state = {f"grad {name}": p.grad.to_local().clone() for name, p in parameters.items()}
        found.append({**state, "y": y.detach(), "dx": x.grad, **registry_state(registry)})
        for parameter in parameters.values():
            parameter.grad = None
            parameter.data.mul_(1.05)
    return found


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_every_step_equals_norm_then_linear(ranks: Ranks, te_ranks: Ranks, kind: str) -> None:
    """Scales, windows, results and all gradients bit for bit, with the native formulas."""
    for pair, bias in (("qkv", kind == "LayerNorm"), ("fc1", False)):
        wanted = ranks.run(states, world_size=1, te=False, kind=kind, pair=pair, bias=bias)[0]
        found = te_ranks.run(states, world_size=1, te=True, kind=kind, pair=pair, bias=bias)[0]
        assert len(found) == len(wanted) == STEPS
        for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert ours.keys() == theirs.keys() and "grad norm.weight" in ours
            assert ("grad norm.bias" in ours) == (kind == "LayerNorm")
            for key, value in theirs.items():
                assert torch.equal(ours[key], value), (pair, step, key)
        for role in ("input", "weight", "grad_output"):
            key = f"fp8.decoder.layers.0.{PAIRS[pair][1]}.{role}.scale"
            assert len({float(state[key]) for state in wanted}) > 1, key


def amaxes() -> tuple[float, float, float]:
    """(recorded amax of the input, of the norm's fp32 result, of its bf16 rounding)."""
    backend, registry, norm, linear = make_pair(True, "RMSNorm", "qkv", False)
    te_cpu.load(native_gemm=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 2, 32, generator=generator).bfloat16()
    with backend.scope(), torch.no_grad():
        linear(norm(x))
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    exact = (wide * norm.weight.to_local().float()).abs().max()
    index = registry.index_of(linear.options.name, "input")
    return float(registry.pending_amax[index]), float(exact), float(exact.bfloat16())


def test_the_norm_kernel_casts_its_fp32_result(te_ranks: Ranks) -> None:
    recorded, exact, rounded = te_ranks.run(amaxes, world_size=1)[0]
    assert recorded == exact != rounded


def high_precision_pair() -> tuple[bool, int]:
    """A BF16 pair inside an FP8 run's scope: equal to the native pair, no quantizer made."""
    results = []
    for te in (True, False):
        backend, _, norm, linear = make_pair(te, "RMSNorm", "fc1", False, fp8=False)
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
        with backend.scope():
            results.append(linear(norm(x)))
        if te:
            count = sum(len(made) for made in linear.quantizers.values())
    return torch.equal(*results), count


def test_a_pair_in_high_precision(te_ranks: Ranks) -> None:
    assert te_ranks.run(high_precision_pair, world_size=1)[0] == (True, 0)


def layout_of(flags: tuple[str, ...]) -> tuple[list[str], list[str], list[str]]:
    """(kinds of norm and linear of block 0, parameter names, state dict names)."""
    training = start_te((*PARITY, *SMALL, *degrees(), *flags))
    (stage,) = training.model.stages
    block: Any = stage.decoder.layers["0"]
    modules = (block.input_layernorm, block.self_attention.linear_qkv, block.mlp.linear_fc1)
    kinds = [type(module).__name__.removeprefix("FSDP") for module in modules]
    return kinds, list(training.model.parameters), list(stage.state_dict())


def native_names() -> list[str]:
    from tests.support.layouts import start_training

    flags = (*PARITY, *SMALL, *degrees(), "--transformer-impl", "native")
    return list(start_training(flags).model.parameters)


def test_names_are_those_of_separate_layers(ranks: Ranks, te_ranks: Ranks) -> None:
    (wanted,) = ranks.run(native_names, world_size=1)
    kinds, names, state = te_ranks.run(layout_of, world_size=1, flags=())[0]
    assert kinds == ["FoldedNorm", "TeNormLinear", "TeNormLinear"]
    assert names == wanted and set(state) == set(wanted)
    kinds, names, _ = te_ranks.run(layout_of, world_size=1, flags=("--no-te-fused-norms",))[0]
    assert kinds == ["Norm", "TeLinear", "TeLinear"] and names == wanted


def test_recomputed_cores_and_blocks_change_nothing(te_ranks: Ranks) -> None:
    """Full and selective recompute with fused norms, TE's core and dropout, bit for bit."""
    command = (*PARITY, *SMALL, *degrees(), "--attention-dropout", "0.1", "--hidden-dropout", "0.1")
    runs = [
        te_ranks.run(train, world_size=1, flags=(*command, *more), iterations=3, te=True)[0]
        for more in ((), *(("--recompute-granularity", how) for how in ("full", "selective")))
    ]
    assert len({tuple(run.curve.losses) for run in runs}) == 1
    assert runs[0].after == runs[1].after == runs[2].after


def deferred_gradients(te: bool, fp8: bool) -> dict[str, Tensor]:
    """Gradients of a biased pair and of a row linear after two backwards and their W slots."""
    if te:
        te_cpu.load(native_gemm=True)
        from megafp8.layers.transformer_engine.backend import TransformerEngineBackend
    queue = DeferredWeightGradients()
    style = {**LLAMA, "disable_bias_linear": False}
    config = small_config(style, **(FP8 if fp8 else {"bf16": True}))
    context = layer_context(config, deferred=queue)
    backend: Any = TransformerEngineBackend(context.recipe, context.mesh) if te else NativeBackend()
    first, second = (f"decoder.layers.0.{name}" for name in PAIRS["qkv"])
    norm, linear = backend.norm_linear(
        context, NormOptions(first, "RMSNorm", 1e-5), LinearOptions(second, "column", fp8, True)
    )
    row = LinearOptions("decoder.layers.0.self_attention.linear_proj", "row", fp8, True)
    modules = {"norm": norm, "linear": linear, "row": backend.linear(context, row)}
    for module in modules.values():
        randomize({f"layernorm.{name}": p for name, p in module.named_parameters()})
        module.to(torch.bfloat16)
    if context.registry is not None:
        context.registry.finalize("cpu")
    work = []
    for seed in range(2):
        x = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
        with backend.scope():
            y = linear(norm(x.requires_grad_()))
            z = modules["row"](y[..., :32].contiguous())
        (y.float().square().sum() + z.float().square().sum()).backward()
        assert linear.weight.grad is None and len(queue.queue) == 2
        work.append(queue.take())
    for run in work:
        run()
    found = {}
    for name, module in modules.items():
        for leaf, parameter in module.named_parameters():
            found[f"{name}.{leaf}"] = parameter.grad.to_local().clone()
    assert found["linear.weight"].dtype == torch.float32
    return found


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_deferred_weight_gradients(ranks: Ranks, te_ranks: Ranks, fp8: bool) -> None:
    """None until the W slots run, then summed in fp32 over micro-batches, as the native ones."""
    (wanted,) = ranks.run(deferred_gradients, world_size=1, te=False, fp8=fp8)
    (found,) = te_ranks.run(deferred_gradients, world_size=1, te=True, fp8=fp8)
    assert found.keys() == wanted.keys() and len(found) == 5
    for name, value in wanted.items():
        assert value.any() and found[name].dtype == value.dtype
        # The biases of TE's GEMM are added before its result is rounded, native ones after.
        assert (found[name] - value).norm() <= 1e-2 * value.norm(), name
