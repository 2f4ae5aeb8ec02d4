"""What travels between ranks: counted bytes are the bytes, and each kind is what it has to be."""

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.profiler import ProfilerActivity, profile

from megafp8.errors import TrainingError
from megafp8.launch.step_traffic import step_bytes
from megafp8.parallel.traffic import summarize
from tests.support.layouts import (
    PARITY,
    PRECISIONS,
    SP,
    VIRTUAL,
    Curve,
    Training,
    degrees,
    start_training,
    train_curve,
)
from tests.support.limits import slow
from tests.support.ranks import Ranks

# The preset with half its batch: 4 micro-batches of 2 x 64 tokens; each block has 4 linears in FP8.
GLOBAL_BATCH, MICRO_BATCH, SEQUENCE, HIDDEN, LAYERS = 8, 2, 64, 128, 4
PRESET = (*PARITY, "--global-batch-size", str(GLOBAL_BATCH))
ZBV = ("--pipeline-schedule", "zbv")
# 128 tokens for each rank, which blocks of 128 along tokens need.
BLOCK_BATCH = ("--seq-length", "128", "--max-position-embeddings", "128")
HSDP_KEPT = ("--fsdp-size", "2", "--reshard-after-forward", "false")
WIRES = ("--fp8-tp-comm", "all", "--fp8-param-gather", "--fp8-grad-reduce")
FP16 = ("--bf16", "false", "--fp16", "--fp8-format", "none", "--initial-loss-scale", "16")


def run(
    ranks: Ranks, size: int, flags: tuple[str, ...], precision: tuple[str, ...] = PRECISIONS["fp8"]
) -> list[Curve]:
    """Two iterations; the second one's traffic is the steady state's."""
    command = (*PRESET, *precision, *flags)
    return ranks.run(train_curve, world_size=size, flags=command, iterations=2)


# ------------------------------------------------------------------------------------------ amax


@pytest.mark.parametrize(
    ("size", "flags", "group", "tensors"),
    [
        # A rank reduces the three tensors of each linear of its own stages.
        (4, degrees(2, 2, SP), 2, 3 * 4 * LAYERS // 2),
        (2, degrees(), 2, 3 * 4 * LAYERS),
        (4, degrees(1, 1, "--fsdp-size", "2"), 4, 3 * 4 * LAYERS),
        (2, degrees(1, 2), 1, 0),
        (1, degrees(), 1, 0),
    ],
    ids=["tp2pp2", "fsdp2", "hsdp2x2", "pp2", "one"],
)
def test_one_amax_reduction_per_step(
    ranks: Ranks, size: int, flags: tuple[str, ...], group: int, tensors: int
) -> None:
    for curve in run(ranks, size, flags):
        wanted = {} if group == 1 else {"amax_all_reduce": 1}
        for mine in curve.my_calls:
            assert {k: n for k, n in mine.items() if k.startswith("amax")} == wanted
        sent = size * (2 * 4 * tensors * (group - 1) // group)
        for total in curve.comm_bytes:
            assert total.get("amax_all_reduce", {}) == ({"float32": sent} if sent else {})


def test_no_amax_travels_without_fp8(ranks: Ranks) -> None:
    for curve in run(ranks, 2, degrees(), PRECISIONS["bf16"]):
        assert all("amax_all_reduce" not in calls for calls in curve.comm_calls)


# ------------------------------------------------------------------------------------------ TP


@pytest.mark.parametrize("tp", [2, slow(4)])
def test_fp8_halves_the_gathers_of_linears(ranks: Ranks, tp: int) -> None:
    fp8 = run(ranks, tp, degrees(tp, 1, SP))[0].comm_bytes[1]
    bf16 = run(ranks, tp, degrees(tp, 1, SP), PRECISIONS["bf16"])[0].comm_bytes[1]
    assert set(fp8["tp_linear_all_gather"]) == {"uint8"}
    assert set(bf16["tp_linear_all_gather"]) == {"bfloat16"}
    gathered = fp8["tp_linear_all_gather"]["uint8"], bf16["tp_linear_all_gather"]["bfloat16"]
    assert 0 < gathered[0] <= 0.51 * gathered[1], gathered
    # A block gathers x of qkv and fc1 twice (fprop, wgrad), dY of proj and fc2 once: 6 tensors.
    tokens = GLOBAL_BATCH * SEQUENCE
    assert gathered[0] == 6 * LAYERS * tokens * HIDDEN * (tp - 1)
    for kind in ("tp_linear_reduce_scatter", "tp_other_all_gather", "tp_other_reduce_scatter"):
        assert fp8[kind] == bf16[kind] and set(fp8[kind]) == {"bfloat16"}, kind


# ------------------------------------------------------------------------------------- pipeline


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize(
    ("size", "flags", "crossings"),
    [
        (2, degrees(1, 2), 1),
        (4, degrees(1, 4), 3),
        (4, degrees(1, 2), 1),
        (2, degrees(1, 2, "--pipeline-schedule", "gpipe"), 1),
        (2, degrees(1, 2, *VIRTUAL, "--num-layers", "8"), 3),
        # Stages 0 1 2 3 are on ranks 0 1 1 0: the middle boundary stays on its rank.
        (2, degrees(1, 2, *ZBV), 2),
    ],
    ids=["pp2", "pp4", "pp2fsdp2", "gpipe", "interleaved", "zbv"],
)
def test_pipeline_bytes_are_those_of_bf16_boundaries(
    ranks: Ranks, size: int, flags: tuple[str, ...], crossings: int, precision: str
) -> None:
    boundary = GLOBAL_BATCH * SEQUENCE * HIDDEN * 2  # all samples once, 2 bytes a value
    for curve in run(ranks, size, flags, PRECISIONS[precision]):
        for total in curve.comm_bytes:
            assert total["pp_p2p"] == {"bfloat16": 2 * crossings * boundary}  # and the gradient


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_pipeline_bytes_with_tensor_parallelism(ranks: Ranks, sequence_parallel: bool) -> None:
    """With sequence parallelism the tp ranks share the boundary; without it each sends it whole."""
    flags = degrees(2, 2, *((SP,) if sequence_parallel else ()))
    copies = 1 if sequence_parallel else 2
    boundary = copies * GLOBAL_BATCH * SEQUENCE * HIDDEN * 2
    curves = run(ranks, 4, flags)
    assert curves[0].comm_bytes[1]["pp_p2p"] == {"bfloat16": 2 * boundary}
    sends = [curve.my_calls[1]["pp_p2p"] for curve in curves]
    # Stage 0 sends each micro-batch's output, stage 1 each one's gradient.
    assert sends == [GLOBAL_BATCH // MICRO_BATCH] * 4


@pytest.mark.parametrize(("flags", "dtype"), [(PRECISIONS["fp32"], "float32"), (FP16, "float16")])
def test_other_runs_send_their_compute_dtype(
    ranks: Ranks, flags: tuple[str, ...], dtype: str
) -> None:
    curve = run(ranks, 2, degrees(1, 2), flags)[0]
    wanted = 2 * GLOBAL_BATCH * SEQUENCE * HIDDEN * {"float32": 4, "float16": 2}[dtype]
    assert curve.comm_bytes[1]["pp_p2p"] == {dtype: wanted}
    assert not any(curve.skipped)


def send_other_dtype() -> str:
    """Rank 0 makes its stage return FP32; it refuses before anything is sent."""
    training = start_training((*PRESET, *degrees(1, 2)))
    training.one_step()  # the first step of a schedule opens connections, on both ranks
    if dist.get_rank() != 0:
        return ""
    training.model.stages[0].register_forward_hook(lambda module, args, output: output.float())
    try:
        training.one_step()
    except TrainingError as error:
        return str(error)
    return "sent"


def send_other_gradient() -> str:
    """Rank 1 hands out a gradient of another dtype."""
    training = start_training((*PRESET, *degrees(1, 2)))
    runner = training.model.runner
    stage = runner._build_schedule(2)._stage
    assert isinstance(stage, PipelineStage)
    message, original = "", PipelineStage.get_bwd_send_ops
    PipelineStage.get_bwd_send_ops = lambda self, chunk: [  # type: ignore[method-assign]
        SimpleNamespace(tensor=torch.ones(2, dtype=torch.float16))
    ]
    try:
        stage.get_bwd_send_ops(0)
    except TrainingError as error:
        message = str(error)
    finally:
        PipelineStage.get_bwd_send_ops = original  # type: ignore[method-assign]
    return message


def test_boundaries_of_another_dtype_are_refused(ranks: Ranks) -> None:
    forward = ranks.run(send_other_dtype, world_size=2)[0]
    assert forward == "stage 0: boundary tensor is torch.float32, allowed torch.bfloat16"
    for stage, message in enumerate(ranks.run(send_other_gradient, world_size=2)):
        assert message == (
            f"stage {stage}: boundary tensor is torch.float16, allowed torch.bfloat16"
        )


# ------------------------------------------------------------------- counters and the profiler


def profiled_step(flags: tuple[str, ...]) -> tuple[dict[str, dict[str, int]], ...]:
    """One iteration's collectives: (as torch's profiler saw them, as we counted them).

    Both are {operation: {"calls": n, "elements": n, "bytes": n}}; elements are those of the full
    tensor, without the algorithm's factor. The profiler gives an all-reduce no dtype.
    """
    training = start_training((*PRESET, *flags))
    training.one_step()
    micro_batches = training.micro_batches()
    # The step alone: the loop's own gather of the counters is not counted.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as record:
        training.step.run(micro_batches, 1e-4, 2)
    counted = _as_operations(training)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _seen(events), counted


SIZES = {"unsigned char": 1, "c10::BFloat16": 2, "float": 4, "double": 8, "long int": 8, "int": 4}
OPERATIONS = {
    # operation: (which input is the full tensor, whether tensors come as a list)
    "c10d::_allgather_base_": ("gather", 0, False),
    "c10d::_reduce_scatter_base_": ("scatter", 1, False),
    "c10d::alltoall_base_": ("scatter", 1, False),
    "c10d::allreduce_": ("reduce", 0, True),
    "c10d::send": ("send", 0, True),
}


def _add(
    table: dict[str, dict[str, int]], operation: str, calls: int, elements: int, size: int
) -> None:
    row = table.setdefault(operation, {"calls": 0, "elements": 0, "bytes": 0})
    row["calls"] += calls
    row["elements"] += elements
    row["bytes"] += elements * size


def _seen(events: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for event in events:
        name, arguments = str(event.get("name", "")), event.get("args", {})
        if name.startswith("c10d::") and name not in OPERATIONS:
            assert name in ("c10d::recv_",), f"{name} is not compared"
        if name not in OPERATIONS:
            continue
        operation, position, listed = OPERATIONS[name]
        shape = arguments["Input Dims"][position]
        elements = 1
        for length in shape[0] if listed else shape:
            elements *= length
        size = 0 if listed else SIZES[arguments["Input type"][position]]
        _add(table, operation, 1, elements, size)
    return table


def _as_operations(training: Training) -> dict[str, dict[str, int]]:
    """Undo the factor of the direct algorithm with the groups that the layout has."""
    layout, item = training.mesh.layout, {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8}
    tp, dp, pp = layout.tp, layout.dp, layout.pp
    groups = {
        "tp_linear_all_gather": ("gather", tp),
        "tp_linear_reduce_scatter": ("scatter", tp),
        "tp_other_all_gather": ("gather", tp),
        "tp_other_reduce_scatter": ("scatter", tp),
        "tp_all_reduce": ("reduce", tp),
        "fsdp_block_all_gather": ("gather", layout.fsdp),
        "fsdp_block_reduce_scatter": ("scatter", layout.fsdp),
        "fsdp_other_all_gather": ("gather", layout.fsdp),
        "fsdp_other_reduce_scatter": ("scatter", layout.fsdp),
        "dp_all_reduce": ("reduce", layout.replicate),
        "amax_all_reduce": ("reduce", tp * dp),
        "grad_norm": ("reduce", tp * dp * pp),
        "tied_embedding": ("reduce", 2),
        "loss": ("reduce", pp * dp),
        "pp_p2p": ("send", 2),
    }
    sent_bytes, sent_calls = summarize(torch.tensor([training.mesh.traffic.drain()]))
    table: dict[str, dict[str, int]] = {}
    for kind, calls in sent_calls.items():
        operation, n = groups[kind]
        assert n > 1, kind
        _add(table, operation, calls, 0, 0)
        for dtype, sent in sent_bytes[kind].items():
            full = {"send": sent, "reduce": sent * n // (2 * (n - 1))}.get(
                operation, sent * n // (n - 1)
            )
            size = item[dtype] if operation in ("gather", "scatter") else 0
            elements = full // item[dtype]
            _add(table, operation, 0, elements, size)
    return table


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (4, degrees(2, 2, SP)),
        slow(4, degrees(2, 1)),
        (4, degrees(1, 1, "--fsdp-size", "2")),
        (4, degrees(1, 2, "--untie-embeddings-and-output-weights", "false")),
        (2, degrees(2, 1, SP, "--fp8-tp-comm", "none")),
        (2, degrees(1, 2, *ZBV)),
        (4, degrees(2, 1, SP, *WIRES)),
    ],
    ids=["tp2pp2", "tp2fsdp2", "hsdp", "pp2fsdp2-tied", "tp2-bf16-gathers", "zbv", "fp8-wires"],
)
def test_counters_equal_the_profiler(ranks: Ranks, size: int, flags: tuple[str, ...]) -> None:
    for seen, counted in ranks.run(profiled_step, world_size=size, flags=flags):
        assert seen == counted
        assert seen["reduce"]["calls"] >= 2


# ------------------------------------------------------------------------------------ arithmetic


def counted_and_computed(flags: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind of one iteration as counted over all ranks, and as a dry run has them."""
    training = start_training((*PRESET, *flags))
    curve = training.iterate(2)
    computed = step_bytes(training.config, training.shape, training.plan, training.mesh.layout)
    counted = {kind: sum(by.values()) for kind, by in curve.comm_bytes[1].items()}
    left_out = ("tp_all_reduce", "dp_all_reduce", "amax_all_reduce", "grad_norm", "loss")
    return {kind: n for kind, n in counted.items() if kind not in left_out}, computed


@pytest.mark.parametrize(
    ("size", "flags"),
    [
        (4, degrees(2, 1, SP, *WIRES)),
        (4, degrees(2, 1, SP, *WIRES, "--reshard-after-forward", "false", "--no-fp8-wgrad")),
        slow(4, degrees(1, 2, *WIRES)),
        (2, degrees(1, 2, *ZBV)),
        (2, degrees(2, 1, SP, "--recompute-granularity", "full", "--recompute-num-layers", "3")),
        slow(4, degrees(1, 1, *HSDP_KEPT)),
        slow(4, degrees(2, 1, "--first-last-layers-bf16", *WIRES)),
        (2, degrees(2, 1, SP, "--fp8-tp-comm", "none")),
        *(
            (2, degrees(2, 1, SP, "--fp8-tp-comm", "all", "--fp8-recipe", recipe, *BLOCK_BATCH))
            for recipe in ("tensorwise", "rowwise", "blockwise", "mxfp8")
        ),
    ],
    ids=[
        "wires",
        "kept",
        "pp2fsdp2",
        "zbv",
        "recompute",
        "hsdp",
        "no-sp",
        "bf16-gathers",
        "tensorwise",
        "rowwise",
        "blockwise",
        "mxfp8",
    ],
)
def test_a_dry_run_knows_the_bytes(ranks: Ranks, size: int, flags: tuple[str, ...]) -> None:
    counted, computed = ranks.run(counted_and_computed, world_size=size, flags=flags)[0]
    assert counted == computed
