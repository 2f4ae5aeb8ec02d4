"""Speed of FP8 against BF16 and against what the device can do, each measured in the same run.

Ceilings first: a copy for what is bound by memory, large BF16 and FP8 products for GEMMs. Then
quantization alone, linears, a block, and training steps of a small model. Weights are cast once in
each repetition, as in a step of one micro-batch.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megafp8.launch.gpu_model import (
    KEY,
    LightTraining,
    Sizes,
    light_block,
    light_context,
    single_layout,
)
from megafp8.layers import LinearOptions
from megafp8.layers.mlp import swiglu
from megafp8.layers.native import NativeBackend
from megafp8.numerics import (
    E4M3,
    QuantizedTensor,
    Recipe,
    ScaleRegistry,
    compute_amax,
    fp8_hardware,
    fprop,
)
from megafp8.numerics import quantize as eager_quantize
from megafp8.numerics.kernels import EAGER, KernelChoice
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.startup import World

LLAMA_8B = Sizes(hidden=4096, ffn=14336, heads=32, groups=8, seq=4096, batch=2)
LLAMA_70B = Sizes(hidden=8192, ffn=28672, heads=64, groups=8, seq=4096, batch=2)
SMALL = Sizes(hidden=2048, ffn=7168, heads=16, groups=8, seq=2048, batch=4, layers=8, vocab=32000)
TINY = Sizes(hidden=64, ffn=128, heads=4, groups=2, seq=32, batch=2, layers=2, vocab=128)


@dataclass(frozen=True)
class Measurement:
    """One line of the speed table; None is not measured.

    Attributes:
        name: what ran.
        precision: "bf16", "fp8" with the kernels, or "" for ceilings.
        milliseconds: median of one repetition.
        tflops: achieved, in units of 10**12 a second.
        of_ceiling: tflops as a share of the measured product in that precision.
        gigabytes: moved in a second, in units of 10**9.
        of_copy: gigabytes as a share of the measured copy.
        speedup: BF16's time over this one's.
        peak_mib: most memory allocated while it ran.
    """

    name: str
    precision: str
    milliseconds: float
    tflops: float | None = None
    of_ceiling: float | None = None
    gigabytes: float | None = None
    of_copy: float | None = None
    speedup: float | None = None
    peak_mib: float | None = None


class Clock:
    """Times calls on a device: CUDA events around each, medians, peak memory."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def __call__(self, call: Callable[[], object]) -> tuple[float, float | None]:
        """Return (median seconds, peak MiB or None without CUDA)."""
        for _ in range(3):  # compiles kernels, fills caches
            call()
        if self.device.type != "cuda":
            times = []
            for _ in range(self.repeats):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            return statistics.median(times), None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        events = []
        for _ in range(self.repeats):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            call()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize(self.device)
        seconds = statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3
        return seconds, torch.cuda.max_memory_allocated(self.device) / 2**20


@dataclass(frozen=True)
class Ceilings:
    """What the device reached in the simplest cases: bytes and operations a second."""

    copy: float
    bf16: float
    fp8: float | None


def measure_ceilings(clock: Clock, size: int) -> tuple[Ceilings, list[Measurement]]:
    """Copy a tensor of size * size * 8 bf16 elements, multiply matrices of that size."""
    device = clock.device
    big = torch.randn(8 * size, size, device=device, dtype=torch.bfloat16)
    copied, _ = clock(partial(torch.empty_like(big).copy_, big))
    copy = 2.0 * big.numel() * 2 / copied
    rows = [Measurement("copy", "", copied * 1e3, gigabytes=copy / 1e9)]
    a, b = big[:size].contiguous(), big[size : 2 * size].contiguous()
    flops = 2.0 * size**3
    taken, _ = clock(lambda: a @ b.t())
    bf16 = flops / taken
    rows.append(Measurement("product", "bf16", taken * 1e3, bf16 / 1e12))
    one, fp8 = torch.ones((), device=device), None
    if fp8_hardware(device)[0]:
        x, w = (QuantizedTensor(eager_quantize(t, one, E4M3), one, E4M3) for t in (a, b))
        taken, _ = clock(lambda: fprop(x, w))
        fp8 = flops / taken
        rows.append(Measurement("product", "fp8", taken * 1e3, fp8 / 1e12, speedup=fp8 / bf16))
    return Ceilings(copy, bf16, fp8), rows


def quantization(
    clock: Clock, ceilings: Ceilings, shape: tuple[int, int], kernels: KernelChoice
) -> list[Measurement]:
    """Cast, amax and transposed copy of bf16 [m, k]: bytes are read once and written twice."""
    m, k = shape
    x = torch.randn(m, k, device=clock.device, dtype=torch.bfloat16)
    wide = torch.randn(m, 2 * k, device=clock.device, dtype=torch.bfloat16)
    scale, amax = torch.ones((), device=clock.device), torch.zeros((), device=clock.device)

    def separate(x: Tensor) -> None:
        torch.maximum(amax, compute_amax(x), out=amax)
        eager_quantize(x, scale, E4M3).t().contiguous()

    calls: dict[str, tuple[Callable[[], object], float]] = {
        "quantize, separate operations": (partial(separate, x), 4.0),
        "swiglu + quantize, separate": (lambda: separate(swiglu(wide)), 6.0),
    }
    if kernels.fused:
        from megafp8.numerics.kernels.cast import cast
        from megafp8.numerics.kernels.fused import norm_cast, swiglu_cast

        weight = torch.ones(k, device=clock.device)
        both: dict[str, Any] = {"amax": amax, "transposed": True}
        calls["quantize, one kernel"] = (lambda: cast(x, scale, E4M3, **both), 4.0)
        calls["swiglu + quantize, one kernel"] = (
            lambda: swiglu_cast(wide, scale, E4M3, **both),
            6.0,
        )
        calls["RMSNorm + quantize, two kernels"] = (
            lambda: norm_cast(x, weight, None, 1e-5, scale, E4M3, **both),
            6.0,
        )
    rows = []
    for name, (call, bytes_each) in calls.items():
        taken, _ = clock(call)
        rate = bytes_each * m * k / taken
        rows.append(
            Measurement(
                f"{name} [{m}, {k}]",
                "fp8",
                taken * 1e3,
                gigabytes=rate / 1e9,
                of_copy=rate / ceilings.copy,
            )
        )
    return rows


def _pass(module: Any, registry: ScaleRegistry | None, x: Tensor, dy: Tensor, *more: Any) -> None:
    """Forward and backward of one micro-batch, weights cast anew."""
    if registry is not None:
        registry.version += 1
    for parameter in module.parameters():
        parameter.grad = None
    x.grad = None
    module(x, *more).backward(dy)


def _compared(
    clock: Clock,
    ceilings: Ceilings,
    name: str,
    flops: float,
    make: Callable[[Recipe | None, KernelChoice], Callable[[], object]],
    kernels: list[KernelChoice],
) -> list[Measurement]:
    """BF16, then FP8 with each of the kernels."""
    rows: list[Measurement] = []
    variants: list[tuple[str, Recipe | None, KernelChoice]] = [("bf16", None, EAGER)]
    variants += [(f"fp8, {choice.chosen}", Recipe(), choice) for choice in kernels]
    for precision, recipe, choice in variants:
        call = make(recipe, choice)
        taken, peak = clock(call)
        del call
        rate = flops / taken
        ceiling = ceilings.bf16 if recipe is None else ceilings.fp8
        row = Measurement(
            name,
            precision,
            taken * 1e3,
            rate / 1e12,
            of_ceiling=None if ceiling is None else rate / ceiling,
            peak_mib=peak,
        )
        bf16 = rows[0].milliseconds if rows else row.milliseconds
        rows.append(replace(row, speedup=bf16 / row.milliseconds))
        gc.collect()  # the next variant's peak must not hold this one's tensors
        if clock.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def linears(
    clock: Clock, ceilings: Ceilings, label: str, sizes: Sizes, mesh: Mesh, kernels: list[Any]
) -> list[Measurement]:
    """Each linear of a block, forward and backward."""
    rows = []
    for short, (inner, outer) in sizes.linears.items():
        part = "mlp" if "fc" in short else "self_attention"
        name = f"decoder.layers.0.{part}.{short}"

        def make(
            recipe: Recipe | None,
            choice: KernelChoice,
            name: str = name,
            inner: int = inner,
            outer: int = outer,
        ) -> Callable[[], object]:
            context = light_context(sizes, mesh, recipe, choice, torch.bfloat16)
            linear = NativeBackend().linear(
                context, LinearOptions(name, "column", recipe is not None, False)
            )
            if context.registry is not None:
                context.registry.finalize(clock.device)
            x = torch.randn(sizes.tokens, 1, inner, device=clock.device, dtype=torch.bfloat16)
            dy = torch.randn(sizes.tokens, 1, outer, device=clock.device, dtype=torch.bfloat16)
            return partial(_pass, linear, context.registry, x.requires_grad_(True), dy)

        flops = 6.0 * sizes.tokens * inner * outer
        title = f"{label} {short} {inner} x {outer}"
        rows += _compared(clock, ceilings, title, flops, make, kernels)
    return rows


def whole_block(
    clock: Clock, ceilings: Ceilings, label: str, sizes: Sizes, mesh: Mesh, kernels: list[Any]
) -> list[Measurement]:
    """One transformer block, forward and backward."""

    def make(recipe: Recipe | None, choice: KernelChoice) -> Callable[[], object]:
        block, registry = light_block(sizes, mesh, recipe, choice)
        shape = (sizes.seq, sizes.batch, sizes.hidden)
        x, dy = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
        return partial(_pass, block, registry, x.requires_grad_(True), dy, KEY)

    return _compared(clock, ceilings, f"{label} block", sizes.block_flops, make, kernels)


def training_step(
    clock: Clock, ceilings: Ceilings, label: str, sizes: Sizes, world: World, kernels: list[Any]
) -> list[Measurement]:
    """A training step of a small model: FSDP2 with fp32 masters, AdamW, scale update."""
    layout = replace(single_layout(), layers_per_stage=sizes.layers)

    def make(recipe: Recipe | None, choice: KernelChoice) -> Callable[[], object]:
        return LightTraining(sizes, build_mesh(layout, world), recipe, choice).step

    name = f"{label} training step, {sizes.layers} layers"
    return _compared(clock, ceilings, name, sizes.model_flops, make, kernels)


def measure_speed(world: World, tiny: bool, kernels: KernelChoice) -> list[Measurement]:
    """Measure everything on one device; one process, inside a process group."""
    clock = Clock(world.device, 3 if tiny else 20)
    mesh = build_mesh(single_layout(), world)
    ceilings, rows = measure_ceilings(clock, 64 if tiny else 8192)
    # FP8 with the kernels, and without them: what they bring.
    choices = [kernels] if not kernels.fused else [kernels, EAGER]
    shapes = {"tiny": TINY} if tiny else {"8B": LLAMA_8B, "70B": LLAMA_70B}
    for sizes in shapes.values():
        rows += quantization(clock, ceilings, (sizes.tokens, sizes.ffn), kernels)
    for label, sizes in shapes.items():
        rows += linears(clock, ceilings, label, sizes, mesh, choices)
        rows += whole_block(clock, ceilings, label, sizes, mesh, choices)
    label, small = ("tiny", TINY) if tiny else ("small", SMALL)
    return rows + training_step(clock, ceilings, label, small, world, choices)


def render_speed(rows: list[Measurement]) -> str:
    """Return the table in Markdown; empty cells are not measured."""
    lines = [
        "| what | precision | ms | TFLOP/s | of ceiling | GB/s | of copy | x bf16 | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    for row in rows:
        cells = [
            row.name,
            row.precision,
            cell(row.milliseconds, ".3f"),
            cell(row.tflops, ".1f"),
            cell(row.of_ceiling, ".0%"),
            cell(row.gigabytes, ".0f"),
            cell(row.of_copy, ".0%"),
            cell(row.speedup, ".2f"),
            cell(row.peak_mib, ".0f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
