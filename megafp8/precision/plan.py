"""The precision plan: for every linear of the model its precision and why, before the first step.

The plan is arithmetic on names and sizes, so all ranks come to the same one without talking, and a
dry run prints what training will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from megafp8.config.layout import Layout
from megafp8.config.policy import high_precision_reasons
from megafp8.config.recipes import RecipeSpec
from megafp8.config.run_config import RunConfig
from megafp8.config.shape import LinearSpec, ModelShape
from megafp8.config.wire import WIRE_BLOCK
from megafp8.errors import PrecisionError
from megafp8.precision.recipe import high_precision_wgrad

Precision = Literal["fp8", "bf16", "fp32", "fp16"]


@dataclass(frozen=True)
class LinearPlan:
    """One linear's precision.

    Attributes:
        name: canonical module name.
        layer: block number.
        in_features: of one rank.
        out_features: of one rank.
        tokens: rows of its GEMM, after the sequence-parallel gather.
        precision: what its GEMMs compute in.
        reason: why.
    """

    name: str
    layer: int
    in_features: int
    out_features: int
    tokens: int
    precision: Precision
    reason: str


@dataclass(frozen=True)
class HighPrecision:
    """A part of the model beside the linears, never FP8 but for the attention core."""

    part: str
    precision: str
    reason: str


@dataclass(frozen=True)
class PrecisionPlan:
    """Every linear's precision, and what stays high.

    Attributes:
        linears: all linears of all blocks, in the order of the forward pass.
        high_precision: the other parts.
        tp_communication: what `--fp8-tp-comm` comes to.
        dp_communication: what `--fp8-param-gather` and `--fp8-grad-reduce` come to.
        weight_gradients: what the weight gradients of FP8 linears are computed from.
        fp8_attention: whether attention cores between two FP8 linears run in FP8.
        compute: what linears that are not FP8 compute in.
        built: the plan that the model was built by, once linears were switched; else None.
    """

    linears: tuple[LinearPlan, ...]
    high_precision: tuple[HighPrecision, ...]
    tp_communication: str
    dp_communication: str
    weight_gradients: str
    fp8_attention: bool = False
    compute: Precision = "bf16"
    built: PrecisionPlan | None = None

    @cached_property
    def _by_name(self) -> dict[str, LinearPlan]:
        return {linear.name: linear for linear in self.linears}

    def precision(self, name: str) -> Precision:
        """Return the precision of a linear.

        Raises:
            PrecisionError: There is no linear of that name.
        """
        if name not in self._by_name:
            known = ", ".join(sorted({_module(item) for item in self.linears}))
            raise PrecisionError(f"plan: no linear is named {name!r}; modules are {known}")
        return self._by_name[name].precision

    def switched(self, name: str, precision: Precision, reason: str) -> PrecisionPlan:
        """Return the plan after a linear was switched; this one if it has that precision already.

        Args:
            name: of the linear.
            precision: "fp8", only for a linear that the model was built with FP8 for, which then
                has its record of that time back; or the compute dtype.
            reason: why, for the record of a linear that leaves FP8.

        Raises:
            PrecisionError: There is no such linear, or it does not take that precision.
        """
        if precision == self.precision(name):
            return self
        built = self.built or self
        record = built._by_name[name]
        if precision == "fp8" and record.precision != "fp8":
            raise PrecisionError(
                f"{name}: found precision 'fp8', allowed {self.compute!r}: the plan has it in "
                f"{record.precision} ({record.reason}), so that it has no FP8 scales"
            )
        if precision not in ("fp8", self.compute):
            raise PrecisionError(
                f"{name}: found precision {precision!r}, allowed 'fp8', {self.compute!r}"
            )
        if precision != record.precision:
            record = replace(record, precision=precision, reason=reason)
        linears = tuple(record if item.name == name else item for item in self.linears)
        if linears == built.linears:
            return built
        return replace(self, linears=linears, built=built)

    def core_is_fp8(self, layer: int) -> bool:
        """Return whether the attention core of a block runs in FP8."""
        prefix = f"decoder.layers.{layer}.self_attention"
        names = (f"{prefix}.linear_qkv", f"{prefix}.linear_proj")
        return self.fp8_attention and all(self.precision(name) == "fp8" for name in names)

    def count(self, precision: Precision) -> int:
        """Return how many linears have a precision."""
        return sum(linear.precision == precision for linear in self.linears)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for the manifest."""
        return {
            "linears": [asdict(linear) for linear in self.linears],
            "high_precision": [asdict(part) for part in self.high_precision],
            "tp_communication": self.tp_communication,
            "dp_communication": self.dp_communication,
            "weight_gradients": self.weight_gradients,
        }

    def render(self) -> str:
        """Return the plan as text; equal linears of several blocks share a line."""
        total = len(self.linears)
        counts = ", ".join(
            f"{self.count(precision)} of {total} linears in {precision.upper()}"
            for precision in ("fp8", "bf16", "fp16", "fp32")
            if self.count(precision)
        )
        lines = [f"precision plan: {counts}"]
        groups: dict[tuple[str, int, int, int, str, str], list[int]] = {}
        for item in self.linears:
            sizes = (item.in_features, item.out_features, item.tokens)
            key = (_module(item), *sizes, item.precision, item.reason)
            groups.setdefault(key, []).append(item.layer)
        for (module, size_in, size_out, tokens, precision, reason), layers in groups.items():
            lines.append(
                f"  {module:<29} layers {number_ranges(layers):<9} [{tokens} x {size_in}] @ "
                f"[{size_in} x {size_out}]  {precision}: {reason}"
            )
        for part in self.high_precision:
            lines.append(f"  {part.part:<29} {part.precision}: {part.reason}")
        lines.append(f"  weight gradients: {self.weight_gradients}")
        lines.append(f"  tensor-parallel traffic: {self.tp_communication}")
        lines.append(f"  data-parallel traffic: {self.dp_communication}")
        return "\n".join(lines)


def build_plan(config: RunConfig, shape: ModelShape, layout: Layout) -> PrecisionPlan:
    """Decide the precision of every linear.

    A linear is FP8 if FP8 is asked for, no rule of the user keeps it out, and its sizes per rank
    and its tokens suit the GEMM. The same holds on every rank, since splits are even.

    Raises:
        PrecisionError: FP8 is asked for and no linear can have it.
        ConfigurationError: A rule of the policy file matches nothing or splits a fused layer.
    """
    compute = config.precision.compute_dtype
    # Read without FP8 too, so that all tracks of a comparison refuse the same policy file.
    kept = high_precision_reasons(config)
    linears = []
    for spec in shape.linears(layout, config.training.micro_batch_size):
        if not config.precision.fp8:
            precision = compute
            reason = f"--{compute}" if compute != "fp32" else "no precision flag"
        else:
            refused = kept.get(spec.name) or _misfit(spec, config.precision.recipe)
            precision = compute if refused else "fp8"
            reason = refused or _fp8_reason(config)
        linears.append(
            LinearPlan(
                spec.name,
                spec.layer,
                spec.in_features,
                spec.out_features,
                spec.tokens,
                precision,
                reason,
            )
        )
    if config.precision.fp8 and all(linear.precision != "fp8" for linear in linears):
        first = linears[0]
        raise PrecisionError(
            f"--fp8-format {config.precision.fp8_format}: no linear can be FP8; {first.name}: "
            f"{first.reason}; drop --fp8-format for a run without FP8"
        )
    return PrecisionPlan(
        tuple(linears),
        _high_precision(config),
        _tp_communication(config, layout),
        _dp_communication(config, layout),
        _weight_gradients(config),
        config.precision.fp8_attention == "dpa",
        compute,
    )


def _misfit(spec: LinearSpec, recipe: RecipeSpec) -> str | None:
    """Say which dimensions an FP8 GEMM does not take; None if all fit."""
    sizes = {
        "in features per rank": spec.in_features,
        "out features per rank": spec.out_features,
        "tokens of the GEMM": spec.tokens,
    }
    who = "FP8 GEMMs"
    if recipe.block_length:
        # Blocks along tokens are those of each rank's own: they may not reach over two ranks.
        who = f"{recipe.name}'s blocks"
        sizes["tokens of one rank"] = spec.local_tokens
    bad = [f"{name} {size}" for name, size in sizes.items() if size % recipe.multiple]
    if not bad:
        return None
    return f"{' and '.join(bad)} not a multiple of {recipe.multiple}, which {who} need"


def _fp8_reason(config: RunConfig) -> str:
    precision = config.precision
    fake = ", multiplied as BF16 (--fp8-fake-quant)" if precision.fp8_fake_quant else ""
    return f"--fp8-format {precision.fp8_format}, recipe {precision.recipe.name}{fake}"


def _high_precision(config: RunConfig) -> tuple[HighPrecision, ...]:
    compute = config.precision.compute_dtype
    core = (compute, "softmax and its products need the range")
    if config.precision.fp8_attention == "dpa":
        core = ("fp8", "--fp8-attention dpa; where linear_qkv and linear_proj are FP8")
    rows = [
        ("embedding", compute, "a table look-up, no GEMM"),
        ("norms", compute, "sums over the hidden size; statistics in fp32"),
        ("attention core", *core),
        ("output_layer", compute, "its errors go straight into the loss"),
        ("loss", "fp32", "a sum over the vocabulary"),
        ("gradients, optimizer, masters", "fp32", "small updates must not be lost"),
    ]
    if config.parallel.pipeline_model_parallel_size > 1:
        rows.append(("pipeline boundaries", compute, "the residual stream and its gradient"))
    return tuple(HighPrecision(*row) for row in rows)


def _weight_gradients(config: RunConfig) -> str:
    if not config.precision.fp8:
        return f"from {config.precision.compute_dtype} operands"
    reason = high_precision_wgrad(config)
    if reason is None:
        return "FP8 operands, accumulated in fp32"
    return f"bf16 operands ({reason}), accumulated in fp32"


def _tp_communication(config: RunConfig, layout: Layout) -> str:
    asked, compute = config.precision.fp8_tp_comm, config.precision.compute_dtype
    if layout.tp == 1:
        return "none, tensor-parallel size is 1"
    if not layout.sequence_parallel:
        idle = f"; --fp8-tp-comm {asked} has nothing to gather" if config.precision.fp8 else ""
        return f"all-reduce in {compute} (no --sequence-parallel{idle})"
    if not config.precision.fp8 or asked == "none":
        return f"all-gather and reduce-scatter in {compute}"
    scatter = compute
    if asked == "all":
        scatter = f"FP8 (a scale every {WIRE_BLOCK} values, summed in fp32)"
    reason = high_precision_wgrad(config)
    if reason is not None:
        return (
            f"all-gather of FP8 linears' inputs in FP8, and again in {compute} for weight "
            f"gradients ({reason}); of output gradients in {compute}; reduce-scatter in {scatter}"
        )
    scales = ""
    if not config.precision.recipe.per_tensor:
        scales = " with its scales, output gradients once for each product"
    return f"all-gather of FP8 linears in FP8 (1 byte a value){scales}, reduce-scatter in {scatter}"


def _dp_communication(config: RunConfig, layout: Layout) -> str:
    precision, compute = config.precision, config.precision.compute_dtype
    gather = precision.fp8 and precision.fp8_param_gather
    reduce = precision.fp8 and precision.fp8_grad_reduce
    replicas = ", all-reduced over replicas in fp32" if layout.replicate > 1 else ""
    if layout.fsdp == 1:
        parts = [f"nothing is sharded, fsdp size is 1{replicas}"]
        if gather:
            parts.append("FP8 weights are cast from the fp32 masters (--fp8-param-gather)")
        if reduce:
            parts.append("--fp8-grad-reduce has nothing to reduce")
        return "; ".join(parts)
    weights = f"parameters gathered in {compute}"
    if gather:
        weights = f"weights of FP8 linears gathered in FP8 (1 byte a value), others in {compute}"
    if not reduce:
        return f"{weights}; gradients reduced in fp32{replicas}"
    carried = ", losses carried over" if precision.fp8_grad_error_feedback else ""
    return (
        f"{weights}; gradients of blocks reduced in FP8 (a scale every {WIRE_BLOCK} values, "
        f"summed in fp32{carried}), others in fp32{replicas}"
    )


def _module(linear: LinearPlan) -> str:
    """Name within the block, such as self_attention.linear_qkv."""
    return linear.name.split(".", 3)[3]


def number_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as 0-3,6: in their order, runs of neighbours as one."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{low}-{high}" if low < high else str(low) for low, high in spans)
