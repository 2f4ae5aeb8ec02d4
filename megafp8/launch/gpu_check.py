"""What one GPU says about FP8: are the values right, and how fast is it.

    python -m megafp8.launch.gpu_check [--tiny] [--steps 50] [--out gpu_check]

Needs torch alone; with Triton it measures the fused kernels, with TransformerEngine (and what
training needs) it compares the two backends. Prints Markdown and writes it, and the same numbers as
JSON. Exit code 1 if a check fails. What cannot be checked here is a row with the reason; what
raises is a failed row with the error, and the rest still runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.config.paths import expand_path
from megafp8.launch.gpu_model import Sizes, light_context, recipes, single_layout
from megafp8.launch.gpu_rows import Row, guarded, render_rows
from megafp8.launch.gpu_speed import LLAMA_8B, TINY, Measurement, measure_speed, render_speed
from megafp8.layers import LinearOptions, transformer_engine
from megafp8.layers.native import NativeBackend
from megafp8.numerics import Recipe, compute_amax, fp8_hardware, recipe_hardware
from megafp8.numerics.kernels import EAGER, KernelChoice, choose_kernels
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.startup import World, start, stop

# Signal to quantization noise in dB. An E4M3 operand alone has about 31 dB, E5M2 25; two of them in
# a product lose 3.
FLOOR_DB = {"y": 24.0, "dx": 19.0, "dw": 19.0}
LINEAR = "decoder.layers.0.self_attention.linear_proj"


def products(
    sizes: Sizes, mesh: Mesh, recipe: Recipe | None, kernels: KernelChoice
) -> dict[str, Tensor]:
    """y, dx and dw of one linear on drawn tensors, equal for all variants.

    FP8 runs twice: the second time its scales have seen the tensors.
    """
    device = mesh.world.device
    torch.manual_seed(0)
    context = light_context(sizes, mesh, recipe, kernels, torch.bfloat16)
    fp8 = recipe is not None
    linear: Any = NativeBackend().linear(context, LinearOptions(LINEAR, "column", fp8, False))
    registry = context.registry
    if registry is not None:
        registry.finalize(device)
    x, dy = (
        torch.randn(sizes.tokens, 1, sizes.hidden, device=device).mul_(size).bfloat16()
        for size in (3.0, 1e-3)
    )
    found: dict[str, Tensor] = {}
    for _ in range(2):
        leaf = x.clone().requires_grad_(True)
        linear.zero_grad()
        y = linear(leaf)
        y.backward(dy)
        assert leaf.grad is not None
        found = {"y": y.detach(), "dx": leaf.grad, "dw": linear.weight.grad.to_local()}
        if registry is not None:
            index = registry.index_of(LINEAR, "weight")
            registry.record(index, compute_amax(linear.weight.detach().to_local()))
            found["amax"] = registry.pending_amax.clone()
            registry.update()
            found["scale"] = registry.scale.clone()
    return found


def decibel(found: Tensor, wanted: Tensor) -> float:
    """Signal to noise of `found` against `wanted`, inf if equal."""
    noise = (found.float() - wanted.float()).norm()
    return float("inf") if noise == 0 else 20 * float(torch.log10(wanted.float().norm() / noise))


def value_rows(sizes: Sizes, mesh: Mesh, kernels: KernelChoice) -> list[Row]:
    """FP8 products against BF16's, and the kernels against plain torch, recipe by recipe."""
    wanted = products(sizes, mesh, None, EAGER)
    rows = []
    for name, recipe in recipes().items():
        units, why = recipe_hardware(recipe, mesh.world.device)
        rows.append(Row(f"{name}: GEMMs", why, "ok" if units else "skipped"))
        call = partial(_recipe_rows, name, recipe, sizes, mesh, kernels, wanted)
        rows += guarded(f"{name}: products", call, rows)
    return rows


def _recipe_rows(
    name: str,
    recipe: Recipe,
    sizes: Sizes,
    mesh: Mesh,
    kernels: KernelChoice,
    wanted: dict[str, Tensor],
) -> list[Row]:
    plain = products(sizes, mesh, recipe, EAGER)
    rows = []
    for key, floor in FLOOR_DB.items():
        value = decibel(plain[key], wanted[key])
        verdict = "ok" if value >= floor else "FAIL"
        rows.append(Row(f"{name}: {key}, fp8 against bf16", f"{value:.1f} dB", verdict, value))
    title = f"{name}: kernels against plain torch"
    if not kernels.fused:
        return [*rows, Row(title, kernels.reason, "skipped")]
    fused = products(sizes, mesh, recipe, kernels)
    differ = [key for key, value in plain.items() if not torch.equal(fused[key], value)]
    found = f"{', '.join(differ)} differ" if differ else "all products and scales are bit-equal"
    return [*rows, Row(title, found, "FAIL" if differ else "ok")]


def backend_rows(world: World, tiny: bool, steps: int) -> list[Row]:
    """TransformerEngine against the native backend, or why not."""
    usable, reason = transformer_engine.available("delayed")
    missing = [name for name in ("pydantic", "yaml") if importlib.util.find_spec(name) is None]
    if usable and missing:
        usable, reason = False, f"{reason}, but {' and '.join(missing)} is missing"
    rows = [Row("TransformerEngine", reason, "ok" if usable else "skipped")]
    if usable:
        # Imported here: it needs what training needs.
        from megafp8.launch import gpu_backends

        sizes = gpu_backends.TINY if tiny else gpu_backends.Sizes()
        rows += gpu_backends.backend_rows(world, sizes, steps)
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
    sizes, mesh = TINY if tiny else LLAMA_8B, build_mesh(single_layout(), world)
    rows += guarded("values", lambda: value_rows(sizes, mesh, kernels), rows)
    rows += guarded("backends", lambda: backend_rows(world, tiny, steps), rows)
    return rows, measure_speed(world, tiny, kernels, rows)


def plain(row: Row | Measurement) -> dict[str, Any]:
    """A row for JSON, which has no inf (two equal tensors, in dB) and no NaN: they are null."""
    values = asdict(row)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = None
    return values


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
