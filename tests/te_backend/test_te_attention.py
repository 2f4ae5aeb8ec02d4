"""TE's DotProductAttention as the attention core, in high precision and in FP8."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from megafp8.errors import PrecisionError
from megafp8.evaluation import validation_loss
from megafp8.layers import CoreOptions
from megafp8.layers.dropout import MicroBatchKey
from megafp8.layers.native import NativeBackend
from megafp8.layers.transformer_engine import availability
from megafp8.numerics import CORE_ROLES
from tests.model.small import layer_context, registry_state, small_config
from tests.support import te_cpu
from tests.support.layouts import BOUNDS, PARITY, SP, degrees, deviations
from tests.support.ranks import Ranks
from tests.support.te_runs import SMALL, start_te, te_curve, train

NAME = "decoder.layers.0.self_attention.core_attention"
LENGTH, BATCH, HEADS, DIM = 32, 2, 4, 16
KEY = MicroBatchKey(7, 0, False, True)
FP8_CORE = ("--fp8-attention", "dpa")
EMULATE = "NVTE_UnfusedDPA_Emulate_FP8"  # TE's own emulation of the FP8 core


def cores(groups: int, window: int | None, dropout: float = 0.0) -> tuple[Any, Any]:
    """(TE's core, the native one) with equal options."""
    te_cpu.load()
    from megafp8.layers.transformer_engine.backend import TransformerEngineBackend

    context = layer_context(small_config())
    options = CoreOptions(NAME, HEADS, groups, DIM, dropout, window)
    te_backend = TransformerEngineBackend(None, context.mesh)
    made = [b.attention_core(context, options) for b in (te_backend, NativeBackend())]
    return made[0], made[1]


def inputs(groups: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(groups)
    # As linear_qkv leaves them: views of one tensor.
    packed = torch.randn(LENGTH, BATCH, HEADS + 2 * groups, DIM, generator=generator).to(dtype)
    parts = packed.split([HEADS, groups, groups], dim=2)
    return [part.detach().requires_grad_() for part in parts]


def compared(groups: int, window: int | None, dtype: torch.dtype) -> list[float]:
    """Largest deviation of result and gradients of q, k, v, relative to the largest value.

    A query that sees itself alone has no gradient, only rounding: the largest value counts as 1 at
    least.
    """
    results = []
    for core in cores(groups, window):
        leaves = inputs(groups, dtype)
        y = core(*leaves, KEY)
        assert y.shape == (LENGTH, BATCH, HEADS * DIM)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(dtype))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    pairs = zip(*results, strict=True)
    return [
        float((a - b).abs().max().float() / b.abs().max().float().clamp(min=1.0)) for a, b in pairs
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_core_equals_sdpa(te_ranks: Ranks, dtype: torch.dtype) -> None:
    """Multi-head, grouped and multi-query; all, itself alone, a few, more than there are."""
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for groups, window in ((4, None), (2, None), (1, None), (4, 0), (2, 5), (1, LENGTH + 3)):
        found = te_ranks.run(compared, world_size=1, groups=groups, window=window, dtype=dtype)[0]
        assert len(found) == 4 and max(found) <= bound, (groups, window, found)


def dropout_masks() -> dict[str, Any]:
    core, _ = cores(4, None, dropout=0.5)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def mask(*key: Any) -> Tensor:
        """Equal scores and values that are the identity show the weights themselves."""
        zeros = torch.zeros(LENGTH, BATCH, HEADS, LENGTH)
        values = torch.eye(LENGTH)[:, None, None].expand(LENGTH, BATCH, HEADS, LENGTH)
        core.options, core.hidden_size_per_attention_head_k = core.options, LENGTH
        core.hidden_size_per_attention_head_v = LENGTH
        weights = core(zeros, zeros, values.contiguous(), MicroBatchKey(*key))
        kept = weights.view(LENGTH, BATCH, HEADS, LENGTH).permute(1, 2, 0, 3) != 0
        return kept[..., seen]

    before = torch.get_rng_state()
    first = mask(7, 0, False, True)
    untouched = torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    return {
        "kept": float(first.float().mean()),
        "replayed": torch.equal(first, mask(7, 0, False, True)),
        "micro-batch": float((mask(8, 0, False, True) == first).float().mean()),
        "rank": float((mask(7, 1, False, True) == first).float().mean()),
        "evaluation": bool(mask(7, 0, False, False).all()),
        "training again": torch.equal(first, mask(7, 0, False, True)),
        "untouched": untouched,
    }


def test_dropout_follows_the_key(te_ranks: Ranks) -> None:
    (found,) = te_ranks.run(dropout_masks, world_size=1)
    assert abs(found["kept"] - 0.5) < 0.03
    assert found["replayed"] and found["evaluation"] and found["training again"]
    assert found["untouched"], "the default generator is left alone"
    for other in ("micro-batch", "rank"):
        assert abs(found[other] - 0.5) < 0.04


# ----------------------------------------------------------------------------------------- FP8 core


def fp8_core_run(flags: tuple[str, ...], iterations: int) -> dict[str, Any]:
    os.environ[EMULATE] = "1"
    training = start_te((*flags, *FP8_CORE))
    curve = training.iterate(iterations)
    registry = training.model.registry
    assert registry is not None
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    cores = [i for i, (name, _) in enumerate(registry.keys) if name.endswith("core_attention")]
    before = registry_state(registry)
    validation_loss(training.model, training.loader, training.mesh, 1, 8)
    after = registry_state(registry)
    return {
        "curve": curve,
        "roles": [registry.keys[i][1] for i in cores],
        "formats": [registry.format_of(i).name for i in cores],
        "entries": (registry.amax_history[:, cores] > 0).sum(0).tolist(),
        "scales": registry.scale[cores].tolist(),
        "clean": all(torch.equal(before[key], after[key]) for key in before),
        "buffers": len(FP8GlobalStateManager.quantization_state.global_amax_buffer),
        "plan": [part.precision for part in training.plan.high_precision if "core" in part.part],
    }


@pytest.mark.parametrize("size", [1, 2])
def test_fp8_core(ranks: Ranks, te_ranks: Ranks, size: int) -> None:
    """Six scales a core in the registry, one entry a step; the loss stays within FP8's bounds."""
    flags = (*PARITY, *SMALL, *(degrees(2, 1, SP) if size == 2 else degrees()))
    found = te_ranks.run(fp8_core_run, world_size=size, flags=flags, iterations=4)
    wanted = ranks.run(train, world_size=size, flags=flags, iterations=4)[0].curve
    loss, norm = deviations(found[0]["curve"], wanted)
    assert 0 < loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1]
    for rank in found:
        assert rank["roles"] == list(CORE_ROLES) * 2 and set(rank["entries"]) == {4}
        assert rank["formats"] == ["e4m3"] * 3 + ["e5m2"] * 3 + ["e4m3"] * 3 + ["e5m2"] * 3
        assert rank["scales"] == found[0]["scales"] and 1.0 not in rank["scales"]
        assert rank["clean"] and rank["buffers"] == 0 and rank["plan"] == ["fp8"]


def fp8_core_resumed(flags: tuple[str, ...], folder: str) -> bool:
    os.environ[EMULATE] = "1"
    whole = train(flags, 4, te=True)
    half = train(flags, 2, te=True, save=folder)
    rest = train(flags, 2, te=True, load=half.saved)
    return rest.after == whole.after and rest.curve.losses == whole.curve.losses[2:]


def test_fp8_core_resumes_bitwise(te_ranks: Ranks, tmp_path: Any) -> None:
    flags = (*PARITY, *SMALL, *degrees(), *FP8_CORE, "--recompute-granularity", "selective")
    assert te_ranks.run(fp8_core_resumed, world_size=1, flags=flags, folder=str(tmp_path)) == [True]


def without_a_core(flags: tuple[str, ...]) -> str:
    te_cpu.load()
    os.environ.pop(EMULATE, None)
    try:
        te_curve(flags, 1)
    except PrecisionError as error:
        return str(error)
    finally:
        os.environ[EMULATE] = "1"
    return ""


def test_no_core_for_fp8_is_said(te_ranks: Ranks) -> None:
    """No flash-attn, no cuDNN and no emulation: nothing is left, and BF16 is no quiet answer."""
    flags = (*PARITY, "--seq-length", "48", *SMALL, *degrees(), *FP8_CORE)
    (said,) = te_ranks.run(without_a_core, world_size=1, flags=flags)
    assert said.startswith(f"{NAME}: TransformerEngine has no attention core in FP8 for q")


# --------------------------------------------------------------------------------- choice of a core


def test_select_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in availability.CORES.values():
        monkeypatch.delenv(name, raising=False)
    availability.select_core("auto")
    availability.select_core("local")
    assert not any(name in os.environ for name in availability.CORES.values())
    availability.select_core("fused")
    values = {core: os.environ[name] for core, name in availability.CORES.items()}
    assert values == {"flash": "0", "fused": "1", "unfused": "0"}
    with pytest.raises(PrecisionError, match="^--attention-backend flash needs NVTE_FLASH_ATTN=1"):
        availability.select_core("flash")
    for name in availability.CORES.values():
        monkeypatch.delenv(name)


def local_and_unfused(flags: tuple[str, ...]) -> list[str]:
    kinds = []
    for core in ("local", "unfused"):
        training = start_te((*flags, "--attention-backend", core))
        block: Any = training.model.stages[0].decoder.layers["0"]
        kinds.append(type(block.self_attention.core_attention).__name__)
        environment = training.model.backend.record()["environment"]
    return [*kinds, *(environment[name] for name in availability.CORES.values())]


def test_core_by_flag_is_recorded(te_ranks: Ranks) -> None:
    flags = (*PARITY, *SMALL, *degrees())
    (found,) = te_ranks.run(local_and_unfused, world_size=1, flags=flags)
    assert found == ["SdpaCore", "TeCore", "0", "0", "1"]


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_core_on_a_gpu(ranks: Ranks, fp8: bool) -> None:
    usable, reason = availability.available(fp8)
    if not usable:
        pytest.skip(reason)
    (found,) = ranks.run(on_a_gpu, world_size=1, fp8=fp8)
    assert max(found) <= (0.2 if fp8 else 2e-2), found


def on_a_gpu(fp8: bool) -> list[float]:
    """Deviation of y, dq, dk, dv from SDPA's on the GPU; FP8 with scales that saw the tensors."""
    from megafp8.layers.transformer_engine.backend import TeOptions, TransformerEngineBackend

    changes = {"fp8_format": "hybrid"} if fp8 else {}
    context = layer_context(small_config(bf16=True, **changes))
    options = CoreOptions(NAME, HEADS, 2, 64, 0.0, None, fp8)
    backend = TransformerEngineBackend(context.recipe, context.mesh, TeOptions(fp8_core=fp8))
    core = backend.attention_core(context, options)
    plain = NativeBackend().attention_core(
        context, CoreOptions(NAME, HEADS, 2, 64, 0.0, None, False)
    )
    if context.registry is not None:
        context.registry.finalize("cuda")
    generator = torch.Generator().manual_seed(0)
    shapes = [(512, BATCH, heads, 64) for heads in (HEADS, 2, 2)]
    tensors = [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes]
    dy = torch.randn(512, BATCH, HEADS * 64, generator=generator).bfloat16().cuda()

    def run(module: Any) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with backend.scope():
            y = module(*leaves, KEY)
        y.backward(dy)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    wanted = run(plain)
    for _ in range(3):
        found = run(core)
        if context.registry is not None:
            context.registry.update()
    return [
        float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True)
    ]
