"""Training with FP8 on the wires: it follows one rank, sends half or a quarter, and stays ordinary.

One rank is compared with the same flags, since `--fp8-param-gather` casts the fp32 masters at any
size; the other two change nothing where nothing travels.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megafp8.layers.native import linear
from megafp8.numerics import compute_amax, quantize
from megafp8.parallel.fp8_weights import Fp8Weight
from megafp8.train.state import state_tensors
from tests.support.launches import TINY, train
from tests.support.layouts import (
    BOUNDS,
    PARITY,
    PRECISIONS,
    QUIET,
    SP,
    Curve,
    Training,
    degrees,
    deviations,
    merge_stages,
    start_training,
    train_curve,
)
from tests.support.ranks import Ranks

TP = ("--fp8-tp-comm", "all")
GATHER = ("--fp8-param-gather",)
REDUCE = ("--fp8-grad-reduce",)
FEEDBACK = (*REDUCE, "--fp8-grad-error-feedback")
ALL = (*TP, *GATHER, *REDUCE)
HALF = ("--num-layers", "2", "--global-batch-size", "8")
FP8 = (*PARITY, *HALF)
BF16 = (*FP8, *PRECISIONS["bf16"])
TP2_FSDP2 = degrees(2, 1, SP)
KEPT, FREED = ("--reshard-after-forward", "false"), ("--reshard-after-forward", "true")
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "1", "--num-layers", "4")
ZBV = ("--pipeline-schedule", "zbv", "--num-layers", "4")
HSDP = ("--fsdp-size", "2")
TENSORWISE = ("--fp8-recipe", "tensorwise")
UNEVEN = ("--hidden-size", "96", "--kv-channels", "16")  # 256 rows of qkv over 3 ranks
THREE = (*UNEVEN, "--global-batch-size", "12")
slow = pytest.mark.slow
Reference = Callable[[tuple[str, ...]], Curve]


def once(*flags: str) -> tuple[str, ...]:
    """Flags of which the last of a name holds."""
    values: dict[str, tuple[str, ...]] = {}
    for index, flag in enumerate(flags):
        if flag.startswith("--"):
            following = flags[index + 1 : index + 2]
            alone = not following or following[0].startswith("--")
            values[flag] = () if alone else following
    return tuple(token for name, value in values.items() for token in (name, *value))


WIRES = {
    "tp_linear_all_gather": 0.52,
    "tp_linear_reduce_scatter": 0.52,
    "fsdp_block_all_gather": 0.52,
    "fsdp_block_reduce_scatter": 0.27,  # of fp32
}


# ------------------------------------------------------------------------------------- bytes


def test_every_wire_sends_what_it_should(ranks: Ranks) -> None:
    """Bars for each kind, in bytes counted from what was sent; one amax collective a step."""
    fp8, bf16 = (
        ranks.run(train_curve, world_size=4, flags=(*flags, *TP2_FSDP2), iterations=2)[0]
        for flags in ((*FP8, *ALL), BF16)
    )
    for sent, wanted in zip(fp8.comm_bytes, bf16.comm_bytes, strict=True):
        for kind, bar in WIRES.items():
            assert set(sent[kind]) == {"uint8"}, kind
            ratio = sent[kind]["uint8"] / sum(wanted[kind].values())
            assert 0.25 < ratio <= bar, (kind, ratio)
        same = [kind for kind in wanted if kind not in WIRES]
        assert {"fsdp_other_all_gather", "fsdp_other_reduce_scatter"} <= set(same)
        assert {kind: sent[kind] for kind in same} == {kind: wanted[kind] for kind in same}
        assert sent.keys() - wanted.keys() == {"amax_all_reduce"}
    for fp8_calls, bf16_calls in zip(fp8.comm_calls, bf16.comm_calls, strict=True):
        assert fp8_calls.pop("amax_all_reduce") == 1
        assert fp8_calls == bf16_calls, "scales travel with what they belong to"


def test_blocks_kept_in_bf16_gather_bf16(ranks: Ranks) -> None:
    """The first block by policy; of the second the norms alone, within its bytes."""
    flags = (*FP8, *GATHER, "--first-last-layers-bf16", "--num-layers-at-end-in-bf16", "0")
    curve = ranks.run(train_curve, world_size=2, flags=(*flags, *KEPT), iterations=1)[0]
    weights = 128 * 256 + 128 * 128 + 128 * 512 + 256 * 128
    sent = curve.comm_bytes[0]["fsdp_block_all_gather"]
    assert sent == {"bfloat16": 2 * (weights + 256), "uint8": weights + 2 * 256}


def test_tp_comm_all_without_sequence_parallelism_changes_nothing(ranks: Ranks) -> None:
    curves = [
        ranks.run(train_curve, world_size=2, flags=(*FP8, *degrees(2), *more), iterations=2)[0]
        for more in ((), TP)
    ]
    assert curves[0].losses == curves[1].losses
    assert curves[0].comm_bytes == curves[1].comm_bytes


# ------------------------------------------------------------------------------------- parity


@pytest.fixture(scope="module")
def reference(ranks: Ranks) -> Reference:
    known: dict[tuple[str, ...], Curve] = {}

    def curve(flags: tuple[str, ...]) -> Curve:
        if flags not in known:
            known[flags] = ranks.run(train_curve, world_size=1, flags=flags, iterations=4)[0]
        return known[flags]

    return curve


@pytest.mark.parametrize(
    ("size", "layout", "wires"),
    [
        pytest.param(2, degrees(2, 1, SP), TP, id="tp2"),
        pytest.param(2, degrees(2, 1, SP), (*TP, "--no-fp8-wgrad"), id="tp2-no-wgrad", marks=slow),
        pytest.param(2, degrees(), GATHER, id="fsdp2-gather"),
        pytest.param(2, degrees(1, 1, *KEPT), GATHER, id="fsdp2-gather-kept", marks=slow),
        pytest.param(2, degrees(), REDUCE, id="fsdp2-reduce"),
        pytest.param(2, degrees(1, 1, *KEPT), FEEDBACK, id="fsdp2-reduce-kept"),
        pytest.param(3, degrees(1, 1, *THREE), ALL, id="fsdp3-uneven"),
        pytest.param(4, TP2_FSDP2, ALL, id="tp2fsdp2"),
        pytest.param(
            4,
            degrees(2, 1, SP, *KEPT, "--recompute-granularity", "full"),
            ALL,
            id="tp2fsdp2-kept-recompute",
            marks=slow,
        ),
        pytest.param(4, TP2_FSDP2, (*ALL, *TENSORWISE), id="tensorwise"),
        pytest.param(4, degrees(1, 1, *HSDP), (*GATHER, *FEEDBACK), id="hsdp"),
        pytest.param(2, degrees(1, 1, "--fsdp-size", "1"), (*GATHER, *REDUCE), id="replicas"),
        pytest.param(4, degrees(1, 2), ALL, id="pp2fsdp2"),
        pytest.param(4, degrees(1, 2, *FREED), ALL, id="pp2fsdp2-freed", marks=slow),
        pytest.param(4, degrees(1, 2, *VIRTUAL), ALL, id="interleaved"),
        pytest.param(4, degrees(1, 2, *ZBV), ALL, id="zbv"),
        pytest.param(4, degrees(2, 2, SP), ALL, id="tp2pp2", marks=slow),
        pytest.param(4, degrees(2, 2, SP, *ZBV), ALL, id="tp2pp2-zbv"),
    ],
)
def test_follows_one_rank(
    ranks: Ranks, reference: Reference, size: int, layout: tuple[str, ...], wires: tuple[str, ...]
) -> None:
    model = ("--num-layers", "--hidden-size", "--kv-channels", "--global-batch-size")
    same = tuple(
        token
        for name in model
        if name in layout
        for token in (name, layout[layout.index(name) + 1])
    )
    same += tuple(flag for flag in wires if flag in (*GATHER, "--no-fp8-wgrad", *TENSORWISE))
    wanted = reference(once(*FP8, *same))
    flags = once(*FP8, *layout, *wires)
    curves = ranks.run(train_curve, world_size=size, flags=flags, iterations=4)
    for curve in curves[1:]:
        assert (curve.losses, curve.grad_norms) == (curves[0].losses, curves[0].grad_norms)
    loss, norm = deviations(curves[0], wanted)
    loss_bound, norm_bound = BOUNDS["fp8"]
    assert loss <= loss_bound, (curves[0].losses, wanted.losses)
    assert norm <= norm_bound, (curves[0].grad_norms, wanted.grad_norms)
    assert not any(curves[0].skipped)


def test_casting_masters_instead_of_gathered_bf16_stays_close(reference: Reference) -> None:
    loss, norm = deviations(reference((*FP8, *GATHER)), reference(FP8))
    assert 0.0 < loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1]


def test_freed_and_kept_gathers_give_the_same_bits(ranks: Ranks) -> None:
    """Codes are cast anew with the same scale, or decoded once and kept: the same codes."""
    one = once(
        *FP8, *GATHER, "--global-batch-size", "4"
    )  # one micro-batch a rank: one order of sums
    curves = [
        ranks.run(train_curve, world_size=2, flags=(*one, *how), iterations=3)[0]
        for how in (FREED, KEPT, (*FREED, "--recompute-granularity", "full"))
    ]
    assert curves[0].losses == curves[1].losses == curves[2].losses
    assert curves[0].grad_norms == curves[1].grad_norms == curves[2].grad_norms


# ------------------------------------------------------------------------------- gathered codes


def gathered_codes(flags: tuple[str, ...]) -> dict[str, bool]:
    """Whether each gathered weight holds the codes of this tp rank's part of its fp32 master."""
    training = start_training(flags)
    training.iterate(2)
    registry, found = training.model.registry, {}
    assert registry is not None
    masters = training.full_parameters()
    for block in training.model.stages[0].decoder.layers.values():
        block.unshard()  # type: ignore[operator]
        for name, module in block.named_modules():
            if not isinstance(module, linear.NativeLinear):
                continue
            gathered, spec = module.weight.to_local(), module.weight.placements[0]
            assert isinstance(gathered, Fp8Weight) and gathered.dtype == torch.bfloat16
            master = masters[f"{module.options.name}.weight"]
            if training.mesh.tp.size > 1:
                master = master.chunk(training.mesh.tp.size, spec.dim)[training.mesh.tp_rank]  # type: ignore[union-attr]
            index = registry.index_of(module.options.name, "weight")
            wanted = quantize(master, registry.scale_of(index), registry.format_of(index))
            operand = gathered.quantized()
            assert torch.equal(operand.scale_inv, 1.0 / registry.scale_of(index))
            if not registry.recipe.stateful:
                amax = compute_amax(masters[f"{module.options.name}.weight"])
                assert torch.equal(registry.scale_of(index), torch.tensor(448.0) / amax)
            same = torch.equal(operand.data.view(torch.uint8), wanted.view(torch.uint8))
            found[f"{block.prefix}.{name}"] = same and float(registry.scale_of(index)) != 1.0
        block.reshard()  # type: ignore[operator]
    return found


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, degrees()),
        (2, degrees()),
        (3, degrees(1, 1, *THREE)),
        (4, TP2_FSDP2),
        (4, degrees(1, 1, *HSDP)),
        (1, TENSORWISE),
        (4, (*TP2_FSDP2, *TENSORWISE)),
    ],
    ids=["one", "fsdp2", "fsdp3-uneven", "tp2fsdp2", "hsdp", "one-tensorwise", "tp2-tensorwise"],
)
def test_gathered_codes_are_those_of_the_whole_master(
    ranks: Ranks, size: int, layout: tuple[str, ...]
) -> None:
    flags = once(*FP8, *GATHER, *layout)
    for found in ranks.run(gathered_codes, world_size=size, flags=flags):
        assert len(found) == 8 and all(found.values()), found


def kinds_of_tensors() -> set[str]:
    """What optimizer and checkpoint see, once FSDP2 has gathered."""
    training = start_training((*FP8, *ALL, *TP2_FSDP2))
    training.one_step()
    kinds = {str(entry.shard.dtype) for entry in training.step.gradients.entries}
    for name, tensor in state_tensors(training.step, optimizer=True, loading=False).items():
        inner = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert type(inner) is Tensor, (name, type(inner))
        kinds.add(str(tensor.dtype))
    return kinds


def test_masters_and_checkpoints_hold_ordinary_fp32(ranks: Ranks) -> None:
    assert ranks.run(kinds_of_tensors, world_size=4) == [{"torch.float32"}] * 4


def weights_after(flags: tuple[str, ...], iterations: int) -> dict[str, str]:
    training = start_training(flags)
    training.iterate(iterations)
    return {k: v for k, v in training.digests().items() if k.startswith("live.")}


@pytest.mark.parametrize("how", [REDUCE, FEEDBACK, (*REDUCE, SP)], ids=lambda how: " ".join(how))
def test_tensor_parallel_ranks_keep_equal_copies(ranks: Ranks, how: tuple[str, ...]) -> None:
    """A norm's shard of 64 values shares its FP8 scale with values that only one tp rank has."""
    flags = (*FP8, *degrees(2), *how)
    held = merge_stages(ranks.run(weights_after, world_size=4, flags=flags, iterations=2))
    assert "live.decoder.layers.0.input_layernorm.weight" in held


def misuse() -> str:
    training = start_training((*FP8, *GATHER))
    block = training.model.stages[0].decoder.layers["0"]
    block.unshard()  # type: ignore[operator]
    weight = block.mlp.linear_fc2.weight.to_local()  # type: ignore[union-attr]
    assert "decoder.layers.0.mlp.linear_fc2" in repr(weight)
    registry = training.model.registry
    assert registry is not None
    registry.update()
    try:
        weight.quantized()
    except AssertionError as error:
        stale = str(error)
    try:
        return f"{weight + 1}"
    except Exception as error:
        return f"{stale}; {type(error).__name__}: {error}"


def test_a_gathered_weight_is_only_multiplied_and_never_after_an_update(ranks: Ranks) -> None:
    message = ranks.run(misuse, world_size=2)[0]
    assert message.startswith("weight gathered before the last scale update; PrecisionError: ")
    assert "gathered in FP8" in message


# --------------------------------------------------------------------- evaluation, faults, resume


def evaluated(flags: tuple[str, ...], evaluates: bool) -> tuple[Curve, list[float]]:
    training, seen = start_training(flags), []

    def evaluate(run: Training) -> None:
        registry = run.model.registry
        assert registry is not None
        if evaluates:
            with registry.paused(), torch.no_grad():
                seen.append(float(run.model.runner.evaluate(run.micro_batches())))

    return training.iterate(3, evaluate), seen


@pytest.mark.parametrize("how", [KEPT, FREED], ids=["kept", "freed"])
def test_evaluation_changes_no_bit(ranks: Ranks, how: tuple[str, ...]) -> None:
    flags = (*FP8, *GATHER, *REDUCE, *how)
    with_it, without = (
        ranks.run(evaluated, world_size=2, flags=flags, evaluates=which)[0]
        for which in (True, False)
    )
    assert with_it[0].losses == without[0].losses
    assert with_it[0].grad_norms == without[0].grad_norms
    assert all(0 < loss < 1e5 for loss in with_it[1]) and len(with_it[1]) == 3


def faulty_step(bad: float, layout: tuple[str, ...]) -> tuple[list[bool], bool, bool]:
    """One weight gradient of rank 0 holds a fault in the second of three steps."""
    # TransformerEngine's way with a fault in a cast, so that only the gradient's norm can tell.
    more = ("--fp8-nonfinite-amax", "freeze")
    training = start_training((*FP8, *GATHER, *FEEDBACK, *more, *layout))
    training.one_step()
    before = training.digests()
    operands = training.model.stages[0].decoder.layers["1"].mlp.linear_fc2.operands  # type: ignore[union-attr]
    original = operands.wgrad

    def spoil(dy: Any, x: Any) -> Tensor:
        dw = original(dy, x)
        dw[-1, -1] = bad  # a row that the other rank owns
        return dw

    if dist.get_rank() == 0:
        operands.wgrad = spoil
    skipped = [training.one_step().skipped]
    operands.wgrad = original
    unchanged = training.digests() == before
    clean = all(reduction.residual is None for reduction in training.model.fp8_reductions)
    skipped.append(training.one_step().skipped)
    return skipped, unchanged, clean


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(("size", "layout"), [(2, ()), (4, degrees(2))], ids=["fsdp2", "tp2-fsdp2"])
def test_a_fault_in_a_gradient_skips_the_step(
    ranks: Ranks, bad: float, size: int, layout: tuple[str, ...]
) -> None:
    for answer in ranks.run(faulty_step, world_size=size, bad=bad, layout=layout):
        assert answer == ([True, False], True, True)


def moved(flags: tuple[str, ...], load: str | None, save: str | None) -> tuple[Curve, str]:
    training = start_training(flags, load)
    curve = training.iterate(3)
    return curve, training.save(save) if save is not None else ""


def test_a_run_with_every_wire_moves_from_layout_to_layout(ranks: Ranks, tmp_path: Path) -> None:
    """tp2 x fsdp2 with every wire, then fsdp2 without any, then pp2 x fsdp2 with all again."""
    joined, load = Curve(), None
    for size, flags in (
        (4, (*TP2_FSDP2, *ALL)),
        (2, degrees()),
        (4, (*degrees(1, 2), *ALL)),
    ):
        curve, load = ranks.run(
            moved, world_size=size, flags=(*FP8, *QUIET, *flags), load=load, save=str(tmp_path)
        )[0]
        joined.losses += curve.losses
        joined.grad_norms += curve.grad_norms
    wanted = ranks.run(train_curve, world_size=1, flags=(*FP8, *QUIET), iterations=9)[0]
    loss, norm = deviations(joined, wanted)
    assert loss <= BOUNDS["fp8"][0] and norm <= BOUNDS["fp8"][1]


class _Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def resumed_messages(save: str, flags: tuple[str, ...]) -> int:
    training = start_training((*FP8, *flags))
    training.one_step()
    path = training.save(save)
    handler, log = _Collected(), logging.getLogger("megafp8.train.state")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        start_training((*FP8, *flags), path)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return sum("--fp8-grad-error-feedback starts from zero" in line for line in handler.lines)


@pytest.mark.parametrize(("flags", "wanted"), [(FEEDBACK, 1), (REDUCE, 0)])
def test_resuming_says_that_residuals_are_gone(
    ranks: Ranks, tmp_path: Path, flags: tuple[str, ...], wanted: int
) -> None:
    counts = ranks.run(resumed_messages, world_size=2, save=str(tmp_path), flags=flags)
    assert counts == [wanted, wanted]


def test_set_up_counts_for_no_iteration(tmp_path: Path) -> None:
    """Gathered weights get their first scales before iteration 1, by a reduction of their own."""
    flags = ("--fp8-recipe", "tensorwise", "--fp8-param-gather", "--fsdp-size", "2")
    place = TINY.index("--fp8-amax-history-len")
    tiny = (*TINY[:place], *TINY[place + 2 :])  # this recipe has none
    run_dir = tmp_path / "run"
    argv = (*tiny, *flags, "--train-iters", "2", "--run-dir", str(run_dir))
    train(2, argv, tmp_path)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["comm_calls"]["amax_all_reduce"] for line in lines] == [1, 1]
