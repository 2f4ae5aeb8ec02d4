"""What one GPU says about FP8: are the values right, and how fast is it.

    python -m bench.gpu.check [--tiny] [--steps 50] [--out gpu_check]

Looks at the model that `pretrain_gpt.py` builds and at its training step: with Triton with the
fused kernels too, with TransformerEngine with both backends. Prints Markdown and writes it, and the
same numbers as JSON. Exit code 1 if a check fails. What cannot be checked here is a row with the
reason; what raises is a failed row with the error, and the rest still runs.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.gpu.rows import Measurement, Row, above, guarded, plain, render_rows, render_speed
from bench.gpu.speed import EAGER, TE, TINY, measure_speed
from bench.model import BF16, RECIPES, BenchModel, Sizes, recipe_of
from megafp8.config.paths import expand_path
from megafp8.layers import transformer_engine
from megafp8.numerics import compute_amax, fp8_hardware, recipe_hardware
from megafp8.numerics.kernels import KernelChoice, choose_kernels
from megafp8.parallel import World, start, stop

# Signal to quantization noise in dB. An E4M3 operand alone has about 31 dB, E5M2 25; two of them in
# a product lose 3.
FLOOR_DB = {"y": 24.0, "dx": 19.0, "dw": 19.0}
# TE and native multiply the same codes and differ in the order of sums.
BETWEEN_BACKENDS_DB = 40.0
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1")
# One block of the small model.
VALUES = Sizes(hidden=2048, ffn=7168, heads=16, groups=8, seq=4096, batch=1)


def decibel(found: Tensor, wanted: Tensor) -> float:
    """Signal to noise of `found` against `wanted`, inf if equal."""
    noise = (found.float() - wanted.float()).norm()
    return float("inf") if noise == 0 else 20 * float(torch.log10(wanted.float().norm() / noise))


def products(bench: BenchModel, step: int) -> dict[str, Tensor]:
    """y, dx and dw of the linears on the drawn x and dy of a step, equal for all models.

    Their sizes move by powers of ten from step to step.
    """
    found: dict[str, Tensor] = {}
    generator = torch.Generator(bench.device).manual_seed(step)
    size = 10.0 ** (step * 7 % 5 - 2)
    for name in LINEARS:
        inner, outer = bench.sizes.linears[name]
        x, dy = (
            torch.randn(bench.sizes.tokens, 1, width, generator=generator, device=bench.device)
            .mul_(scale)
            .bfloat16()
            for width, scale in ((inner, size), (outer, size * 1e-3))
        )
        linear = bench.linear(name)
        x.requires_grad_(True)
        with bench.model.scope():
            y = linear(x)
        y.backward(dy)
        assert x.grad is not None
        dw, linear.weight.grad = linear.weight.grad.to_local().flatten(0, -2), None
        found |= {f"y {name}": y.detach(), f"dx {name}": x.grad, f"dw {name}": dw}
    return found


def update_scales(bench: BenchModel) -> dict[str, Tensor]:
    """End a step; returns the amaxes that went in and the scales that came out (BF16: none)."""
    registry = bench.registry
    if registry is None:
        return {}
    for name in LINEARS:
        weight = bench.linear(name).weight.detach().to_local()
        part = "mlp" if "fc" in name else "self_attention"
        index = registry.index_of(f"decoder.layers.0.{part}.{name}", "weight")
        registry.record(index, compute_amax(weight))
    amax = registry.pending_amax.clone()
    registry.update()
    return {"amax": amax, "scale": registry.scale.clone()}


def settled(sizes: Sizes, flags: tuple[str, ...], world: World) -> dict[str, Tensor]:
    """`products` and scales of a new model, whose scales have seen the tensors once before."""
    bench, found = BenchModel(sizes, flags, world), {}
    for _ in range(2):
        found = products(bench, 0) | update_scales(bench)
    return found


def worst_db(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """For y, dx and dw the lowest signal to noise of the linears."""
    return {
        key: min(decibel(found[f"{key} {name}"], wanted[f"{key} {name}"]) for name in LINEARS)
        for key in FLOOR_DB
    }


def product_rows(title: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[Row]:
    """FP8 products against BF16's."""
    return [
        above(f"{title}: {key}, fp8 against bf16", value, FLOOR_DB[key])
        for key, value in worst_db(found, wanted).items()
    ]


def recipe_rows(
    name: str, sizes: Sizes, world: World, kernels: KernelChoice, wanted: dict[str, Tensor]
) -> list[Row]:
    """FP8 products of a recipe against BF16's, and the kernels against plain torch."""
    eager = settled(sizes, (*RECIPES[name], *EAGER), world)
    rows, title = product_rows(name, eager, wanted), f"{name}: kernels against plain torch"
    if not kernels.fused:
        return [*rows, Row(title, kernels.reason, "skipped")]
    fused = settled(sizes, RECIPES[name], world)
    differ = [key for key, value in eager.items() if not torch.equal(fused[key], value)]
    found = f"{', '.join(differ)} differ" if differ else "all products and scales are bit-equal"
    return [*rows, Row(title, found, "FAIL" if differ else "ok")]


def scale_rows(native: BenchModel, other: BenchModel, steps: int) -> list[Row]:
    """Feed the same tensors to both backends and compare the whole scale state after each step."""
    assert native.registry is not None and other.registry is not None
    title, worst = "scales and histories, TE = native", dict.fromkeys(FLOOR_DB, float("inf"))
    for step in range(steps):
        found = worst_db(products(other, step), products(native, step))
        worst = {key: min(worst[key], value) for key, value in found.items()}
        update_scales(native)
        update_scales(other)
        ours, theirs = native.registry.tensors(), other.registry.tensors()
        bad = [key for key, value in ours.items() if not torch.equal(theirs[key], value)]
        if bad:
            differ = f"{len(bad)} of {len(ours)} tensors differ at step {step}: {bad[0]}"
            return [Row(title, differ, "FAIL")]
    return [
        Row(title, f"bit-equal over {steps} steps", "ok"),
        *(
            above(f"{key}, TE against native", value, BETWEEN_BACKENDS_DB)
            for key, value in worst.items()
        ),
    ]


def backend_rows(sizes: Sizes, world: World, steps: int, wanted: dict[str, Tensor]) -> list[Row]:
    """TransformerEngine against BF16 and against the native backend."""
    rows = product_rows("TransformerEngine", settled(sizes, TE, world), wanted)
    models = (BenchModel(sizes, flags, world) for flags in (RECIPES["delayed"], TE))
    return rows + scale_rows(*models, steps)


def value_rows(sizes: Sizes, world: World, kernels: KernelChoice, steps: int) -> list[Row]:
    """What is checked of values: recipe by recipe, then the backends."""
    rows: list[Row] = []
    for wanted in guarded("bf16: products", lambda: [settled(sizes, BF16, world)], rows):
        for name, flags in RECIPES.items():
            recipe = recipe_of(sizes, flags)
            assert recipe is not None
            units, why = recipe_hardware(recipe, world.device)
            rows.append(Row(f"{name}: GEMMs", why, "ok" if units else "skipped"))
            call = partial(recipe_rows, name, sizes, world, kernels, wanted)
            rows += guarded(f"{name}: products", call, rows)
        usable, why = transformer_engine.available("delayed")
        rows.append(Row("TransformerEngine", why, "ok" if usable else "skipped"))
        if usable:
            call = partial(backend_rows, sizes, world, steps, wanted)
            rows += guarded("backends", call, rows)
    return rows


def run_checks(world: World, tiny: bool, steps: int) -> tuple[list[Row], list[Measurement]]:
    """Run everything that this machine can; one process, inside a process group."""
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    native_fp8, why = fp8_hardware(device)
    kernels = choose_kernels("auto", device)
    rows = [
        Row("device", name),
        Row("torch", torch.__version__),
        Row("native FP8 GEMMs", why, "ok" if native_fp8 else "skipped"),
        Row("fused kernels", kernels.reason, "ok" if kernels.fused else "skipped"),
    ]
    rows += value_rows(TINY if tiny else VALUES, world, kernels, steps)
    return rows, measure_speed(world, tiny, kernels, rows)


def main(argv: list[str]) -> int:
    """Run the checks from the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="FP8 on one GPU")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--steps", type=int, default=50, help="steps of the scale comparison")
    out_help = "OUT.json and OUT.md are written"
    parser.add_argument("--out", type=expand_path, default="gpu_check", help=out_help)
    arguments = parser.parse_args(argv)
    world = start(0, 1, 0)
    rows, speed = run_checks(world, arguments.tiny, arguments.steps)
    stop()
    table = render_rows(rows) + "\n" + render_speed(speed)
    out = Path(arguments.out)
    out.with_suffix(".md").write_text(table, encoding="utf-8")
    content = {"checks": [plain(row) for row in rows], "speed": [plain(row) for row in speed]}
    text = json.dumps(content, indent=1, allow_nan=False)
    out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(table)
    return 1 if any(row.verdict == "FAIL" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
