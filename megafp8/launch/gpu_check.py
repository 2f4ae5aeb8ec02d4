"""What one GPU says about the two backends: equal scales, outputs within tolerance, speed.

    python -m megafp8.launch.gpu_check [--tiny] [--steps 50] [--out gpu_check]

Prints a Markdown table and writes it with the numbers as JSON. Exit code 1 if a check fails. What
cannot be checked here (no TransformerEngine, no GPU) is a row with the reason.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.config import RunConfig, load_config
from megafp8.launch.dry_run import preflight
from megafp8.layers import transformer_engine
from megafp8.model import Model, build_model
from megafp8.model.batch import to_tensors
from megafp8.numerics import compute_amax, fp8_hardware
from megafp8.parallel import Mesh, World, build_mesh, start, stop
from megafp8.precision import recipe_from_config
from megafp8.train.loss_scaler import build_loss_scaler
from megafp8.train.step import TrainingStep

BF16, NATIVE, TE, FUSED = "bf16", "native fp8", "te fp8", "te fp8, fused norms"
FLAGS = {
    BF16: ("--transformer-impl", "native", "--fp8-format", "none"),
    NATIVE: ("--transformer-impl", "native", "--fp8-format", "hybrid", "--fp8-emulate"),
    # Separate norms: its linears can be fed with what the native ones are fed with.
    TE: (
        "--transformer-impl",
        "transformer_engine",
        "--fp8-format",
        "hybrid",
        "--no-te-fused-norms",
    ),
    FUSED: ("--transformer-impl", "transformer_engine", "--fp8-format", "hybrid"),
}
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
# Signal to quantization noise in dB. An E4M3 operand alone has about 31 dB, E5M2 25; two of them in
# a product lose 3. TE and native multiply the same codes and differ in the order of sums.
FLOOR_DB = {"y": 24.0, "dx": 19.0, "dw": 19.0}
BETWEEN_BACKENDS_DB = 40.0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        check: what was looked at.
        found: the number or the reason, in words.
        verdict: "ok", "FAIL", "skipped", or "" for a measurement.
        value: the number, if there is one.
    """

    check: str
    found: str
    verdict: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model that is checked."""

    hidden: int = 4096
    ffn: int = 14336
    seq: int = 4096
    repeats: int = 20


TINY = Sizes(hidden=64, ffn=128, seq=32, repeats=3)


class _Setup:
    """A one-block GPT of one kind (BF16, native FP8, TE FP8) and its training step."""

    def __init__(self, kind: str, sizes: Sizes, world: World) -> None:
        self.kind, self.sizes = kind, sizes
        self.config: RunConfig = load_config([*_model_flags(sizes), *FLAGS[kind]])
        self.config, shape, plan = preflight(self.config, 1)
        self.mesh: Mesh = build_mesh(self.config.layout(1), world)
        recipe = recipe_from_config(self.config)
        self.model: Model = build_model(self.config, shape, plan, recipe, self.mesh)
        self.stage: Any = self.model.stages[0]
        self.step = TrainingStep(
            self.config, self.model, self.mesh, build_loss_scaler(self.config.precision)
        )

    def linear(self, name: str) -> Any:
        """A linear of block 0, with its parameters gathered in BF16."""
        block = self.stage.decoder.layers["0"]
        block.unshard()
        return block.get_submodule(name)

    def products(self, name: str, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        """y, dx and dw of one linear."""
        linear, leaf = self.linear(name), x.clone().requires_grad_(True)
        linear.weight.grad = None
        with self.model.scope():
            y = linear(leaf)
        y.backward(dy)
        assert leaf.grad is not None
        weight: Any = linear.weight
        dw = weight.grad.to_local().flatten(0, -2)
        linear.weight.grad = None
        return {"y": y.detach(), "dx": leaf.grad, "dw": dw}

    def train(self, number: int) -> None:
        """One training iteration on generated tokens."""
        size = self.sizes.seq
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 1000, (1, size + 1), generator=generator)
        batch = {
            "tokens": tokens[:, :-1].contiguous().numpy(),
            "labels": tokens[:, 1:].contiguous().numpy(),
            "loss_mask": torch.ones(1, size).numpy(),
            "position_ids": torch.arange(size)[None].numpy(),
        }
        self.step.run(to_tensors([batch], self.mesh, 0, number), 1e-4, number + 1)


def _model_flags(sizes: Sizes) -> list[str]:
    heads = max(sizes.hidden // 128, 4)
    flags = f"""
        --num-layers 1 --hidden-size {sizes.hidden} --ffn-hidden-size {sizes.ffn}
        --num-attention-heads {heads} --seq-length {sizes.seq} --position-embedding-type rope
        --max-position-embeddings {sizes.seq} --normalization RMSNorm --swiglu
        --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0
        --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000
        --micro-batch-size 1 --global-batch-size 1 --train-iters 1000 --lr 1e-4 --bf16
    """
    return flags.split()


def _inputs(setup: _Setup, name: str, step: int) -> tuple[Tensor, Tensor]:
    """The x and dy of a step, equal for all kinds, with sizes that move by powers of ten."""
    linear = setup.linear(name)
    out_features, in_features = linear.weight.to_local().flatten(0, -2).shape
    generator = torch.Generator().manual_seed(1000 * step + len(name))
    size = 10.0 ** (step * 7 % 5 - 2)
    tensors = [
        (torch.randn(setup.sizes.seq, 1, width, generator=generator) * scale).bfloat16()
        for width, scale in ((in_features, size), (out_features, size * 1e-3))
    ]
    x, dy = (tensor.to(setup.mesh.world.device) for tensor in tensors)
    return x, dy


def _decibel(found: Tensor, wanted: Tensor) -> float:
    noise = (found.float() - wanted.float()).norm()
    return float("inf") if noise == 0 else 20 * float(torch.log10(wanted.float().norm() / noise))


def scale_rows(native: _Setup, other: _Setup, steps: int) -> list[Row]:
    """Feed the same tensors to both backends and compare the whole scale state after each step."""
    registries = [native.model.registry, other.model.registry]
    worst: dict[str, float] = {}
    for step in range(steps):
        for name in LINEARS:
            x, dy = _inputs(native, name, step)
            ours, theirs = (setup.products(name, x, dy) for setup in (native, other))
            for key in ours:
                worst[key] = min(worst.get(key, float("inf")), _decibel(theirs[key], ours[key]))
        for setup, registry in zip((native, other), registries, strict=True):
            assert registry is not None
            for name in LINEARS:
                index = registry.index_of(f"decoder.layers.0.{name}", "weight")
                registry.record(index, compute_amax(setup.linear(name).weight.to_local()))
            registry.update()
        states = [registry.tensors() for registry in registries if registry is not None]
        bad = [key for key in states[0] if not torch.equal(states[0][key], states[1][key])]
        if bad:
            found = f"{len(bad)} of {len(states[0])} tensors differ at step {step}: {bad[0]}"
            return [Row("scales and histories, TE = native", found, "FAIL")]
    rows = [Row("scales and histories, TE = native", f"bit-equal over {steps} steps", "ok")]
    for key, value in worst.items():
        verdict = "ok" if value >= BETWEEN_BACKENDS_DB else "FAIL"
        rows.append(Row(f"{key}, TE against native", f"{value:.1f} dB", verdict, value))
    return rows


def output_rows(reference: _Setup, setup: _Setup) -> list[Row]:
    """FP8 products against BF16 ones, with scales that have seen the tensors."""
    registry, rows = setup.model.registry, []
    assert registry is not None
    for name in LINEARS:
        x, dy = _inputs(setup, name, 0)
        for _ in range(2):  # the first pass casts with scales from before
            found = setup.products(name, x, dy)
            index = registry.index_of(f"decoder.layers.0.{name}", "weight")
            registry.record(index, compute_amax(setup.linear(name).weight.to_local()))
            registry.update()
        wanted = reference.products(name, x, dy)
        for key, floor in FLOOR_DB.items():
            value = _decibel(found[key], wanted[key])
            verdict = "ok" if value >= floor else "FAIL"
            rows.append(
                Row(
                    f"{key} of {name}, {setup.kind} against bf16", f"{value:.1f} dB", verdict, value
                )
            )
    return rows


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for number in range(repeats + 3):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        if number >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def speed_rows(setups: list[_Setup]) -> list[Row]:
    """Forward and backward of each linear, and whole training steps, against BF16.

    Linears of a model with fused norms are left out: they hold the norm.
    """
    rows, device = [], setups[0].mesh.world.device
    repeats = setups[0].sizes.repeats
    for name in LINEARS:
        x, dy = _inputs(setups[0], name, 0)
        baseline = 0.0
        for setup in (setup for setup in setups if setup.kind != FUSED):
            call = partial(setup.products, name, x, dy)
            taken = _seconds(call, device, repeats)
            baseline = baseline or taken
            text = f"{taken * 1e3:.3f} ms, {baseline / taken:.2f}x of bf16"
            rows.append(Row(f"{name}, {setup.kind}", text, "", taken))
    baseline = 0.0
    for setup in setups:
        taken = _seconds(partial(setup.train, 0), device, repeats)
        baseline = baseline or taken
        rate = setup.sizes.seq / taken
        text = f"{rate:.0f} tokens/s, {baseline / taken:.2f}x of bf16"
        rows.append(Row(f"training step of one block, {setup.kind}", text, "", rate))
    return rows


def run_checks(world: World, sizes: Sizes, steps: int) -> list[Row]:
    """Run everything that this machine can; one process, inside a process group."""
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    native_fp8, why = fp8_hardware(device)
    rows = [
        Row("device", name),
        Row("torch", torch.__version__),
        Row("native FP8 GEMMs", why, "ok" if native_fp8 else "skipped"),
    ]
    bf16, native = _Setup(BF16, sizes, world), _Setup(NATIVE, sizes, world)
    rows += output_rows(bf16, native)
    setups = [bf16, native]
    usable, reason = transformer_engine.available("delayed")
    rows.append(Row("TransformerEngine", reason, "ok" if usable else "skipped"))
    if usable:
        # Fresh models of both: scale state from the start.
        rows += scale_rows(_Setup(NATIVE, sizes, world), _Setup(TE, sizes, world), steps)
        setups.append(_Setup(TE, sizes, world))
        rows += output_rows(bf16, setups[-1])
        setups.append(_Setup(FUSED, sizes, world))
    return rows + speed_rows(setups)


def render(rows: list[Row]) -> str:
    """Return the table in Markdown."""
    lines = ["| check | found | |", "|---|---|---|"]
    return "\n".join(lines + [f"| {r.check} | {r.found} | {r.verdict} |" for r in rows]) + "\n"


def main(argv: list[str]) -> int:
    """Run the checks from the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="gpu_check", description="compare the two backends")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--steps", type=int, default=50, help="steps of the scale comparison")
    parser.add_argument("--out", default="gpu_check", help="OUT.json and OUT.md are written")
    arguments = parser.parse_args(argv)
    world = start(0, 1, 0)
    rows = run_checks(world, TINY if arguments.tiny else Sizes(), arguments.steps)
    stop()
    table = render(rows)
    out = Path(arguments.out)
    out.with_suffix(".md").write_text(table, encoding="utf-8")
    content = json.dumps([asdict(row) for row in rows], indent=1)
    out.with_suffix(".json").write_text(content + "\n", encoding="utf-8")
    print(table)
    return 1 if any(row.verdict == "FAIL" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
