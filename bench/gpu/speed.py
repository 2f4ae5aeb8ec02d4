"""Speed of FP8 against BF16 and against what the device can do, each measured in the same run.

Ceilings first: a copy for what is bound by memory, large BF16 and FP8 products for GEMMs. Then
quantization alone, linears, a block, and training steps of a small model. Weights are cast once in
each repetition, as in a step of one micro-batch.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.rows import Measurement, Row, guarded
from bench.model import BF16, KEY, RECIPES, BenchModel, Sizes, recipe_of
from megafp8.layers import transformer_engine
from megafp8.layers.mlp import swiglu
from megafp8.numerics import (
    E4M3,
    E5M2,
    Fp8Format,
    QuantizedTensor,
    compute_amax,
    dgrad,
    fp8_hardware,
    fprop,
    recipe_hardware,
    wgrad,
)
from megafp8.numerics import quantize as eager_quantize
from megafp8.numerics.kernels import KernelChoice
from megafp8.parallel import World

LLAMA_8B = Sizes(hidden=4096, ffn=14336, heads=32, groups=8, seq=4096, batch=2)
LLAMA_70B = Sizes(hidden=8192, ffn=28672, heads=64, groups=8, seq=4096, batch=2)
SMALL = Sizes(hidden=2048, ffn=7168, heads=16, groups=8, seq=2048, batch=4, layers=8, vocab=32000)
TINY = Sizes(hidden=128, ffn=256, heads=4, groups=2, seq=64, batch=2, vocab=128)

EAGER = ("--fp8-kernels", "eager")
TE_FUSED = ("--transformer-impl", "transformer_engine", "--fp8-format", "hybrid")
# Separate norms: its linears can be fed with what the native ones are fed with.
TE = (*TE_FUSED, "--no-te-fused-norms")

# The flags of what is compared, by what the table calls it.
Variants = dict[str, tuple[str, ...]]


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
    clock: Clock, ceilings: Ceilings, sizes: Sizes, kernels: KernelChoice
) -> list[Measurement]:
    """Cast, amax and transposed copy of bf16 [m, k]: bytes are read once and written twice."""
    m, k = sizes.tokens, sizes.ffn
    x = torch.randn(m, k, device=clock.device, dtype=torch.bfloat16)
    wide = torch.randn(m, 2 * k, device=clock.device, dtype=torch.bfloat16)
    scale, amax = torch.ones((), device=clock.device), torch.zeros((), device=clock.device)

    def separate(x: Tensor) -> None:
        torch.maximum(amax, compute_amax(x), out=amax)
        eager_quantize(x, scale, E4M3).t().contiguous()

    # A call, and the bytes that it moves for an element.
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
        norm = partial(norm_cast, x, weight, None, 1e-5, scale, E4M3, **both)
        rows = partial(cast_rows, x, E4M3, power_of_2=False)
        calls |= {
            "quantize, one kernel": (partial(cast, x, scale, E4M3, **both), 4.0),
            "swiglu + quantize, one kernel": (partial(swiglu_cast, wide, scale, E4M3, **both), 6.0),
            "RMSNorm + quantize, two kernels": (norm, 6.0),
            "quantize rows and columns, two kernels": (rows, 6.0),
        }
        for block in ((1, 128), (128, 1), (1, 32), (32, 1)):
            options = {"mx": 32 in block, "power_of_2": True, "transposed": block[1] == 1}
            call = partial(cast_blocks, x, block, E4M3, **options)
            calls[f"quantize blocks {block[0]}x{block[1]}, one kernel"] = (call, 3.0)
    found = []
    for name, (call, bytes_each) in calls.items():
        taken, _ = clock(call)
        rate = bytes_each * m * k / taken
        row = Measurement(f"{name} [{m}, {k}]", "fp8", taken * 1e3, gigabytes=rate / 1e9)
        found.append(replace(row, of_copy=rate / ceilings.copy))
    return found


@dataclass(frozen=True)
class Work:
    """What is timed of a model.

    Attributes:
        name: what the table calls it.
        flops: operations of a call.
        prepare: gives the call.
        products: seconds of its three FP8 products alone, where the device multiplies FP8.
    """

    name: str
    flops: float
    prepare: Callable[[BenchModel], Callable[[], object]]
    products: float | None = None


def compared(
    clock: Clock,
    ceilings: Ceilings,
    world: World,
    failures: list[Row],
    sizes: Sizes,
    variants: Variants,
    works: list[Work],
) -> list[Measurement]:
    """Time each piece of work with each variant, against BF16; what raises is in `failures`."""

    def measure(precision: str, bench: BenchModel, work: Work) -> list[Measurement]:
        taken, peak = clock(work.prepare(bench))
        rate, fp8 = work.flops / taken, bench.registry is not None
        ceiling = ceilings.fp8 if fp8 else ceilings.bf16
        of_ceiling = None if ceiling is None else rate / ceiling
        overhead = 1 - work.products / taken if fp8 and work.products is not None else None
        row = Measurement(work.name, precision, taken * 1e3, rate / 1e12, of_ceiling)
        return [replace(row, overhead=overhead, peak_mib=peak)]

    def measure_all(precision: str, flags: tuple[str, ...]) -> list[Measurement]:
        bench, rows = BenchModel(sizes, flags, world), []
        bench.start_fsdp()
        for work in works:
            call = partial(measure, precision, bench, work)
            rows += guarded(f"speed: {work.name}, {precision}", call, failures)
            clock.forget()
        return rows

    rows: list[Measurement] = []
    for precision, flags in variants.items():
        title = f"speed: model of {works[0].name}, {precision}"
        rows += guarded(title, partial(measure_all, precision, flags), failures)
        clock.forget()
    names = [work.name for work in works]
    rows.sort(key=lambda row: names.index(row.name))
    bf16 = {row.name: row.milliseconds for row in rows if row.precision == "bf16"}
    return [
        replace(row, speedup=bf16[row.name] / row.milliseconds) if row.name in bf16 else row
        for row in rows
    ]


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


def _passes(
    bench: BenchModel, module: Any, widths: tuple[int, int], *more: Any
) -> Callable[[], None]:
    """Forward and backward of a part of block 0 for one micro-batch, its weights cast anew."""
    shape = (bench.sizes.seq, bench.sizes.batch)
    x, dy = (
        torch.randn(*shape, width, device=bench.device, dtype=torch.bfloat16) for width in widths
    )
    x.requires_grad_(True)
    for parameter in bench.block().parameters():  # what was timed before leaves its gradients
        parameter.grad = None

    def call() -> None:
        if bench.registry is not None:
            bench.registry.version += 1
        for parameter in module.parameters():
            parameter.grad = None
        x.grad = None
        with bench.model.scope():
            y = module.forward(x, *more)
        y.backward(dy)

    return call


def linear_work(name: str, sizes: Sizes, linear: str, products: float | None = None) -> Work:
    """One linear of a block, forward and backward."""
    inner, outer = sizes.linears[linear]

    def prepare(bench: BenchModel) -> Callable[[], None]:
        return _passes(bench, bench.linear(linear), (inner, outer))

    flops = 6.0 * sizes.tokens * inner * outer
    return Work(f"{name} {inner} x {outer}", flops, prepare, products)


def layer_works(clock: Clock, label: str, sizes: Sizes) -> list[Work]:
    """The linears of a block and the block, forward and backward."""
    works = []
    for linear, widths in sizes.linears.items():
        products = None
        if fp8_hardware(clock.device)[0]:
            products = three_products(clock, sizes.tokens, *widths)
        works.append(linear_work(f"{label} {linear}", sizes, linear, products))

    def block(bench: BenchModel) -> Callable[[], None]:
        return _passes(bench, bench.block(), (sizes.hidden, sizes.hidden), KEY)

    return [*works, Work(f"{label} block", sizes.block_flops, block)]


def recipe_works(label: str, sizes: Sizes) -> list[Work]:
    """The MLP's second linear, for a comparison of recipes."""
    return [linear_work(f"{label} recipes,", sizes, "linear_fc2")]


def step_works(label: str, sizes: Sizes) -> list[Work]:
    """A training step: gradients, their norm, AdamW on fp32 masters, scale update."""

    def prepare(bench: BenchModel) -> Callable[[], object]:
        return partial(bench.step.run, [bench.drawn_batch()], 1e-4, 1)

    return [Work(f"{label} training step, {sizes.layers} layers", sizes.model_flops, prepare)]


def variants_of(kernels: KernelChoice) -> Variants:
    """BF16, then delayed FP8 with the kernels and without them: what they bring."""
    delayed = RECIPES["delayed"]
    found = {"bf16": BF16, f"fp8, {kernels.chosen}": delayed}
    return found | {"fp8, eager": (*delayed, *EAGER)}


def recipe_variants(sizes: Sizes, device: torch.device, kernels: KernelChoice) -> Variants:
    """BF16, and every recipe that the device multiplies itself."""
    recipes = {name: recipe_of(sizes, flags) for name, flags in RECIPES.items()}
    return {"bf16": BF16} | {
        f"fp8 {name}, {kernels.chosen}": RECIPES[name]
        for name, recipe in recipes.items()
        if recipe is not None and recipe_hardware(recipe, device)[0]
    }


def with_backends(variants: Variants) -> Variants:
    """The variants, and TransformerEngine's where it can be used."""
    usable, _ = transformer_engine.available("delayed")
    return variants | ({"te fp8": TE, "te fp8, fused norms": TE_FUSED} if usable else {})


def measure_speed(
    world: World, tiny: bool, kernels: KernelChoice, failures: list[Row]
) -> list[Measurement]:
    """Measure everything on one device; one process, inside a process group.

    What raises is added to `failures`, and the rest is still measured.
    """
    clock = Clock(world.device, 3 if tiny else 20)
    ceilings, rows = measure_ceilings(clock, 64 if tiny else 8192)
    compare = partial(compared, clock, ceilings, world, failures)
    shapes = {"tiny": TINY} if tiny else {"8B": LLAMA_8B, "70B": LLAMA_70B}
    variants = variants_of(kernels)
    parts: dict[str, Callable[[], list[Measurement]]] = {}
    for label, sizes in shapes.items():
        call = partial(quantization, clock, ceilings, sizes, kernels)
        parts[f"{label} quantization"] = call
    for label, sizes in shapes.items():
        layers = partial(layer_works, clock, label, sizes)
        parts[f"{label} layers"] = lambda s=sizes, layers=layers: compare(s, variants, layers())
    label, sizes = next(iter(shapes.items()))
    recipes = recipe_variants(sizes, world.device, kernels)
    if len(recipes) > 1:
        parts["recipes"] = partial(compare, sizes, recipes, recipe_works(label, sizes))
    label, small = ("tiny", replace(TINY, layers=2)) if tiny else ("small", SMALL)
    backends = with_backends(variants)
    parts["training step"] = partial(compare, small, backends, step_works(label, small))
    for name, part in parts.items():
        rows += guarded(f"speed: {name}", part, failures)
        clock.forget()
    return rows
