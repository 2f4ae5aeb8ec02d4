"""TransformerEngine against the native backend on one GPU: equal scales, outputs within tolerance.

Needs what training needs (pydantic, PyYAML); `gpu_check` imports it only where TE can be used.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megafp8.config import RunConfig, load_config
from megafp8.launch.dry_run import preflight
from megafp8.launch.gpu_check import FLOOR_DB, decibel
from megafp8.launch.gpu_rows import Row
from megafp8.launch.gpu_speed import Clock
from megafp8.model import Model, build_model
from megafp8.model.batch import to_tensors
from megafp8.numerics import compute_amax
from megafp8.parallel import Mesh, World, build_mesh
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
# TE and native multiply the same codes and differ in the order of sums.
BETWEEN_BACKENDS_DB = 40.0


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


def scale_rows(native: _Setup, other: _Setup, steps: int) -> list[Row]:
    """Feed the same tensors to both backends and compare the whole scale state after each step."""
    registries = [native.model.registry, other.model.registry]
    worst: dict[str, float] = {}
    for step in range(steps):
        for name in LINEARS:
            x, dy = _inputs(native, name, step)
            ours, theirs = (setup.products(name, x, dy) for setup in (native, other))
            for key in ours:
                worst[key] = min(worst.get(key, float("inf")), decibel(theirs[key], ours[key]))
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
            value = decibel(found[key], wanted[key])
            verdict = "ok" if value >= floor else "FAIL"
            rows.append(
                Row(
                    f"{key} of {name}, {setup.kind} against bf16", f"{value:.1f} dB", verdict, value
                )
            )
    return rows


def backend_rows(world: World, sizes: Sizes, steps: int) -> list[Row]:
    """Everything that compares the two backends with each other and with BF16."""
    reference, other = _Setup(BF16, sizes, world), _Setup(TE, sizes, world)
    rows = output_rows(reference, _Setup(NATIVE, sizes, world)) + output_rows(reference, other)
    for setup in (other, _Setup(FUSED, sizes, world)):
        taken, _ = Clock(world.device, sizes.repeats)(partial(setup.train, 0))
        rate, name = sizes.seq / taken, f"training step of one block, {setup.kind}"
        rows.append(Row(name, f"{rate:.0f} tokens/s", "", rate))
    # Fresh models of both: scale state from the start.
    return rows + scale_rows(_Setup(NATIVE, sizes, world), _Setup(TE, sizes, world), steps)
