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
    recipes,
    single_layout,
)
from megafp8.launch.gpu_rows import Row, guarded
from megafp8.layers import LinearOptions
from megafp8.layers.mlp import swiglu
from megafp8.layers.native import NativeBackend
from megafp8.numerics import (
    E4M3,
    E5M2,
    Fp8Format,
    QuantizedTensor,
    Recipe,
    ScaleRegistry,
    compute_amax,
    dgrad,
    fp8_hardware,
    fprop,
    recipe_hardware,
    wgrad,
)
from megafp8.numerics import quantize as eager_quantize
from megafp8.numerics.kernels import EAGER, KernelChoice
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.startup import World

LLAMA_8B = Sizes(hidden=4096, ffn=14336, heads=32, groups=8, seq=4096, batch=2)
LLAMA_70B = Sizes(hidden=8192, ffn=28672, heads=64, groups=8, seq=4096, batch=2)
SMALL = Sizes(hidden=2048, ffn=7168, heads=16, groups=8, seq=2048, batch=4, layers=8, vocab=32000)
TINY = Sizes(hidden=128, ffn=256, heads=4, groups=2, seq=64, batch=2, layers=2, vocab=128)


# What a row calls it, the recipe (None: BF16), what quantizes.
Variant = tuple[str, "Recipe | None", KernelChoice]


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
        overhead: share of the time that is not in the three FP8 products: quantization, mostly.
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
    overhead: float | None = None
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

    def forget(self) -> None:
        """Let go of what the last call held, so that the next peak is its own."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


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
        from megafp8.numerics.kernels.blocks import cast_blocks
        from megafp8.numerics.kernels.cast import cast
        from megafp8.numerics.kernels.fused import norm_cast, swiglu_cast
        from megafp8.numerics.kernels.rows import cast_rows

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
        calls["quantize rows and columns, two kernels"] = (
            lambda: cast_rows(x, E4M3, power_of_2=False),
            6.0,
        )
        for name, block, mx in (("1x128", (1, 128), False), ("128x1", (128, 1), False),
                                ("1x32", (1, 32), True), ("32x1", (32, 1), True)):  # fmt: skip
            call = partial(
                cast_blocks, x, block, E4M3, mx=mx, power_of_2=True, transposed=block[1] == 1
            )
            calls[f"quantize blocks {name}, one kernel"] = (call, 3.0)
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


def _variants(kernels: list[KernelChoice]) -> list[Variant]:
    """BF16, then delayed FP8 with each of the kernels."""
    fp8 = [(f"fp8, {choice.chosen}", Recipe(), choice) for choice in kernels]
    return [("bf16", None, EAGER), *fp8]


def _compared(
    clock: Clock,
    ceilings: Ceilings,
    name: str,
    flops: float,
    make: Callable[[Recipe | None, KernelChoice], Callable[[], object]],
    variants: list[Variant],
    products: float | None = None,
) -> list[Measurement]:
    """Each variant, against the first, which is BF16; `products` are seconds of FP8's GEMMs."""
    rows: list[Measurement] = []
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
            overhead=None if recipe is None or products is None else 1 - products / taken,
            peak_mib=peak,
        )
        bf16 = rows[0].milliseconds if rows else row.milliseconds
        rows.append(replace(row, speedup=bf16 / row.milliseconds))
        clock.forget()
    return rows


def three_products(clock: Clock, tokens: int, inner: int, outer: int) -> float:
    """Seconds of fprop, dgrad and wgrad alone, on operands that are in FP8 in both directions."""

    def operand(rows: int, columns: int, fmt: Fp8Format) -> QuantizedTensor:
        x = torch.randn(rows, columns, device=clock.device, dtype=torch.bfloat16)
        codes = eager_quantize(x, one, fmt)
        return QuantizedTensor(codes, one, fmt, transposed=codes.t().contiguous())

    one = torch.ones((), device=clock.device)
    x, w = operand(tokens, inner, E4M3), operand(outer, inner, E4M3)
    dy = operand(tokens, outer, E5M2)
    taken, _ = clock(lambda: (fprop(x, w), dgrad(dy, w), wgrad(dy, x)))
    clock.forget()
    return taken


def _linear_pass(
    clock: Clock, sizes: Sizes, mesh: Mesh, short: str, recipe: Recipe | None, choice: KernelChoice
) -> Callable[[], object]:
    """Forward and backward of one linear of a block, to be called often."""
    inner, outer = sizes.linears[short]
    part = "mlp" if "fc" in short else "self_attention"
    name = f"decoder.layers.0.{part}.{short}"
    context = light_context(sizes, mesh, recipe, choice, torch.bfloat16)
    linear = NativeBackend().linear(
        context, LinearOptions(name, "column", recipe is not None, False)
    )
    if context.registry is not None:
        context.registry.finalize(clock.device)
    x, dy = (
        torch.randn(sizes.tokens, 1, width, device=clock.device, dtype=torch.bfloat16)
        for width in (inner, outer)
    )
    return partial(_pass, linear, context.registry, x.requires_grad_(True), dy)


def linears(
    clock: Clock, ceilings: Ceilings, label: str, sizes: Sizes, mesh: Mesh, variants: list[Variant]
) -> list[Measurement]:
    """Each linear of a block, forward and backward."""
    rows = []
    for short, (inner, outer) in sizes.linears.items():
        products = None
        if fp8_hardware(clock.device)[0]:
            products = three_products(clock, sizes.tokens, inner, outer)
        make = partial(_linear_pass, clock, sizes, mesh, short)
        flops, title = 6.0 * sizes.tokens * inner * outer, f"{label} {short} {inner} x {outer}"
        rows += _compared(clock, ceilings, title, flops, make, variants, products)
    return rows


def other_recipes(
    clock: Clock, ceilings: Ceilings, label: str, sizes: Sizes, mesh: Mesh, kernels: KernelChoice
) -> list[Measurement]:
    """The MLP's second linear with every recipe that the device multiplies itself."""
    variants: list[Variant] = [("bf16", None, EAGER)]
    for name, recipe in recipes().items():
        if recipe_hardware(recipe, clock.device)[0]:
            variants.append((f"fp8 {name}, {kernels.chosen}", recipe, kernels))
    if len(variants) == 1:
        return []
    inner, outer = sizes.linears["linear_fc2"]
    make = partial(_linear_pass, clock, sizes, mesh, "linear_fc2")
    flops, title = 6.0 * sizes.tokens * inner * outer, f"{label} recipes, {inner} x {outer}"
    return _compared(clock, ceilings, title, flops, make, variants)


def whole_block(
    clock: Clock, ceilings: Ceilings, label: str, sizes: Sizes, mesh: Mesh, variants: list[Variant]
) -> list[Measurement]:
    """One transformer block, forward and backward."""

    def make(recipe: Recipe | None, choice: KernelChoice) -> Callable[[], object]:
        block, registry = light_block(sizes, mesh, recipe, choice)
        shape = (sizes.seq, sizes.batch, sizes.hidden)
        x, dy = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16) for _ in range(2))
        return partial(_pass, block, registry, x.requires_grad_(True), dy, KEY)

    return _compared(clock, ceilings, f"{label} block", sizes.block_flops, make, variants)


def training_step(
    clock: Clock,
    ceilings: Ceilings,
    label: str,
    sizes: Sizes,
    world: World,
    variants: list[Variant],
) -> list[Measurement]:
    """A training step of a small model: FSDP2 with fp32 masters, AdamW, scale update."""
    layout = replace(single_layout(), layers_per_stage=sizes.layers)

    def make(recipe: Recipe | None, choice: KernelChoice) -> Callable[[], object]:
        return LightTraining(sizes, build_mesh(layout, world), recipe, choice).step

    name = f"{label} training step, {sizes.layers} layers"
    return _compared(clock, ceilings, name, sizes.model_flops, make, variants)


def measure_speed(
    world: World, tiny: bool, kernels: KernelChoice, failures: list[Row]
) -> list[Measurement]:
    """Measure everything on one device; one process, inside a process group.

    What raises is added to `failures`, and the rest is still measured.
    """
    clock = Clock(world.device, 3 if tiny else 20)
    mesh = build_mesh(single_layout(), world)
    ceilings, rows = measure_ceilings(clock, 64 if tiny else 8192)
    # FP8 with the kernels, and without them: what they bring.
    variants = _variants([kernels] if not kernels.fused else [kernels, EAGER])
    shapes = {"tiny": TINY} if tiny else {"8B": LLAMA_8B, "70B": LLAMA_70B}
    parts: dict[str, Callable[[], list[Measurement]]] = {}
    for label, sizes in shapes.items():
        shape = (sizes.tokens, sizes.ffn)
        parts[f"{label} quantization"] = partial(quantization, clock, ceilings, shape, kernels)
    for label, sizes in shapes.items():
        known = (clock, ceilings, label, sizes, mesh)
        parts[f"{label} linears"] = partial(linears, *known, variants)
        parts[f"{label} block"] = partial(whole_block, *known, variants)
    label, sizes = next(iter(shapes.items()))
    parts["recipes"] = partial(other_recipes, clock, ceilings, label, sizes, mesh, kernels)
    label, small = ("tiny", TINY) if tiny else ("small", SMALL)
    parts["training step"] = partial(training_step, clock, ceilings, label, small, world, variants)
    for name, part in parts.items():
        rows += guarded(f"speed: {name}", part, failures)
        clock.forget()
    return rows


def render_speed(rows: list[Measurement]) -> str:
    """Return the table in Markdown; empty cells are not measured."""
    lines = [
        "| what | precision | ms | TFLOP/s | of ceiling | GB/s | of copy | x bf16 | overhead "
        "| peak MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
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
            cell(row.overhead, ".0%"),
            cell(row.peak_mib, ".0f"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
