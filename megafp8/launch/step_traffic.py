"""Bytes that training sends in one iteration, by arithmetic: what `metrics.jsonl` will count.

The kinds are those of `comm_bytes`, and so is the rule: what the ranks send by the direct
algorithm, (n-1)/n of a full tensor for gathers, reduce-scatters and all-to-alls, summed over all
ranks. Left out are all-reduces, which FP8 does not change: over replicas (HSDP), over tensor
parallel ranks without --sequence-parallel, and small ones (amaxes, norms, losses).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megafp8.config.axes import axes_of
from megafp8.config.layout import Layout
from megafp8.config.run_config import RunConfig
from megafp8.config.shape import ModelShape, ParameterSpec
from megafp8.config.wire import payload_bytes
from megafp8.precision.plan import PrecisionPlan, build_plan
from megafp8.precision.recipe import high_precision_wgrad

FP32 = 4


def step_bytes(
    config: RunConfig, shape: ModelShape, plan: PrecisionPlan, layout: Layout
) -> dict[str, int]:
    """Return bytes by kind of one iteration, all ranks together; only kinds that occur.

    Args:
        config: with the batch size filled in.
        shape: sizes of the model.
        plan: which linears are FP8.
        layout: degrees of parallelism.
    """
    size, micro = config.training.global_batch_size, config.training.micro_batch_size
    assert size is not None, "resolved by the caller"
    count = layout.num_microbatches(size, micro)
    total: dict[str, int] = defaultdict(int)
    _data_parallel(total, config, shape, plan, layout, count)
    _tensor_parallel(total, config, shape, plan, layout, count * layout.dp)
    _pipeline(total, config, shape, layout, count * layout.dp)
    return {kind: sent for kind, sent in total.items() if sent}


def _compute_bytes(config: RunConfig) -> int:
    return FP32 if config.precision.compute_dtype == "fp32" else 2


def _data_parallel(
    total: dict[str, int],
    config: RunConfig,
    shape: ModelShape,
    plan: PrecisionPlan,
    layout: Layout,
    count: int,
) -> None:
    precision, item = config.precision, _compute_bytes(config)
    freed = layout.reshard_after_forward
    gathers, reductions = (2 * count, count) if freed else (1, 1)
    # Each rank sends its shard, or as much of each other's gradient, to all the others.
    copies = layout.count(axes_of("stage")) * (layout.fsdp - 1)

    def shard(spec: ParameterSpec) -> int:
        return spec.shard_numel(layout.tp, layout.fsdp)

    def gathered(spec: ParameterSpec) -> int:
        module = spec.name.removesuffix(".weight")
        fp8 = spec.kind == "linear" and plan.precision(module) == "fp8"
        return shard(spec) * (1 if fp8 and precision.fp8_param_gather else item)

    for stage in range(layout.num_stages):
        specs = shape.stage_parameters(layout, stage)
        for layer in layout.stage_layers(stage):
            block = [spec for spec in specs if spec.layer == layer]
            total["fsdp_block_all_gather"] += gathers * copies * sum(map(gathered, block))
            values = sum(map(shard, block))
            fp8 = precision.fp8 and precision.fp8_grad_reduce
            row = payload_bytes(values) if fp8 else FP32 * values
            total["fsdp_block_reduce_scatter"] += reductions * copies * row
        others = sum(shard(spec) for spec in specs if spec.layer is None)
        total["fsdp_other_all_gather"] += gathers * copies * item * others
        total["fsdp_other_reduce_scatter"] += reductions * copies * FP32 * others


@dataclass(frozen=True)
class _Operand:
    """Bytes that a rank hands to the gathers of a linear: x, x again for wgrad, dy."""

    x: int
    x_for_wgrad: int
    dy: int


def _fp8_operand(config: RunConfig, values: int, features: int) -> _Operand:
    """Bytes of an FP8 linear's `values` values in rows of `features`."""
    recipe, high = config.precision.recipe, values * _compute_bytes(config)
    fp8_wgrad = high_precision_wgrad(config) is None
    if config.precision.fp8_tp_comm == "none":  # x is saved whole once it is cast
        return _Operand(high, 0 if fp8_wgrad else high, high)
    product = values + recipe.scale_bytes(values, features)
    if not fp8_wgrad:
        return _Operand(product, high, high)
    # With scales along what a product sums over, dy has a cast for each of its two products.
    return _Operand(product, product, product if recipe.per_tensor else 2 * product)


def _tensor_parallel(
    total: dict[str, int],
    config: RunConfig,
    shape: ModelShape,
    plan: PrecisionPlan,
    layout: Layout,
    batches: int,
) -> None:
    if layout.tp == 1 or not layout.sequence_parallel:
        return
    precision, training, item = config.precision, config.training, _compute_bytes(config)
    own = shape.seq_length * training.micro_batch_size * shape.hidden_size // layout.tp
    copies = batches * layout.tp * (layout.tp - 1)
    recomputed = 0
    if training.recompute_granularity == "full":
        recomputed = training.recompute_num_layers or layout.layers_per_stage
    for linear in shape.linears(layout, training.micro_batch_size):
        fp8 = plan.precision(linear.name) == "fp8"
        again = int(linear.layer % layout.layers_per_stage < recomputed)
        high = _Operand(own * item, own * item, own * item)
        operand = _fp8_operand(config, own, shape.hidden_size) if fp8 else high
        reduced = payload_bytes(own) if fp8 and precision.fp8_tp_comm == "all" else own * item
        column = linear.mode == "column"
        gathered = operand.x * (1 + again) + operand.x_for_wgrad if column else operand.dy
        total["tp_linear_all_gather"] += copies * gathered
        total["tp_linear_reduce_scatter"] += copies * reduced * (1 if column else 1 + again)
    # The embedding scatters forward and gathers backward, the output layer the other way round.
    total["tp_other_all_gather"] += 2 * copies * own * item
    total["tp_other_reduce_scatter"] += 2 * copies * own * item


def _pipeline(
    total: dict[str, int], config: RunConfig, shape: ModelShape, layout: Layout, batches: int
) -> None:
    owner = {index: rank for rank in range(layout.pp) for index in layout.stage_indices(rank)}
    crossings = sum(owner[index] != owner[index + 1] for index in range(layout.num_stages - 1))
    copies = 1 if layout.sequence_parallel else layout.tp
    boundary = shape.seq_length * config.training.micro_batch_size * shape.hidden_size
    sent = 2 * crossings * batches * copies * boundary * _compute_bytes(config)
    total["pp_p2p"] += sent


def communication_text(
    config: RunConfig, shape: ModelShape, plan: PrecisionPlan, layout: Layout
) -> str:
    """Return the table of a dry run: bytes by kind, and what the same run sends without FP8."""
    mine = step_bytes(config, shape, plan, layout)
    precision = config.precision.model_copy(update={"fp8_format": "none"})
    bf16 = config.model_copy(update={"precision": precision})
    plain = step_bytes(bf16, shape, build_plan(bf16, shape, layout), layout)
    if not plain:
        return "nothing is sent between ranks"
    lines = [f"{'kind':<28}{'bytes an iteration':>20}{'of the run without FP8':>24}"]
    blocks = [kind for kind in plain if kind.startswith(("fsdp_block", "tp_linear"))]
    for kind in sorted(plain):
        lines.append(_row(kind, mine[kind], plain[kind]))
    if blocks:
        lines.append(_row("blocks", sum(mine[k] for k in blocks), sum(plain[k] for k in blocks)))
    lines.append(_row("all", sum(mine.values()), sum(plain.values())))
    return "\n".join(lines)


def _row(name: str, sent: int, plain: int) -> str:
    return f"{name:<28}{sent:>20}{sent / plain:>24.3f}"
