"""Hugging Face folders with weights in FP8, as vLLM and SGLang read them.

    static      <linear>.weight F8_E4M3, .weight_scale and .input_scale fp32 0-dim
    dynamic     the same without .input_scale
    blockwise   .weight_scale_inv fp32, one factor for each block of 128x128

All factors multiply the stored codes (or the engine's activations) back: they are `scale_inv` here.
Per-tensor weights of q, k and v (gate and up) come from one tensor of ours and share its scale, as
in training; engines that fuse them again need not requantize.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.convert.hf import Item, plain_items
from megafp8.convert.hf_names import LLAMA_FAMILY, routes
from megafp8.convert.routes import Route
from megafp8.convert.safetensors_files import (
    SCALES_NAME,
    Described,
    SafetensorsFolder,
    SafetensorsWriter,
)
from megafp8.convert.view import Checksums, ModelView
from megafp8.errors import CheckpointError
from megafp8.numerics import (
    E4M3,
    QuantizedTensor,
    Recipe,
    compute_amax,
    quantize,
    quantize_blocks,
)
from megafp8.numerics.scales import current_scale

BLOCK = 128
_BLOCKWISE = Recipe(name="blockwise")


@dataclass(frozen=True)
class Fp8Plan:
    """Which linears of an export are FP8.

    Attributes:
        mode: static, dynamic or blockwise.
        chosen: our names of their weights.
        ignored: Hugging Face modules that stay in high precision.
    """

    mode: str
    chosen: frozenset[str]
    ignored: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """Field `quantization_config` of `config.json`."""
        values: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "static" if self.mode == "static" else "dynamic",
        }
        if self.mode == "blockwise":
            values |= {"fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        if self.ignored:
            # vLLM reads the first name, transformers and SGLang the second.
            values |= {
                "ignored_layers": list(self.ignored),
                "modules_to_not_convert": list(self.ignored),
            }
        return {"quantization_config": values}


def make_plan(view: ModelView, model_type: str, mode: str) -> Fp8Plan:
    """Choose the linears: those with scale state, all of the blocks where there is none.

    Raises:
        CheckpointError: GPT-2's layout, or `static` without the inputs' scales.
    """
    if model_type not in LLAMA_FAMILY:
        raise CheckpointError(
            f"--fp8 {mode}: {model_type} has no FP8 layout; allowed: none, scales"
        )
    linears = [s.name for s in view.shape.parameters() if s.kind == "linear"]
    with_state = {name for name in linears if _scale_name(name, "input") in view.scales}
    if mode == "static" and not with_state:
        raise CheckpointError(
            f"--fp8 static: {view.path} holds no FP8 scale state of inputs; allowed: dynamic, "
            "blockwise (or a checkpoint of an FP8 run)"
        )
    chosen = frozenset(with_state or linears)
    by_name = {route.ours: route for route in routes(model_type, view.shape)}
    ignored = ["lm_head"] if not view.shape.tied else []
    ignored += [
        theirs.removesuffix(".weight")
        for name in linears
        if name not in chosen
        for theirs in by_name[name].theirs
    ]
    return Fp8Plan(mode, chosen, tuple(ignored))


def _scale_name(weight: str, role: str) -> str:
    return f"fp8.{weight.removesuffix('.weight')}.{role}.scale"


def fp8_items(
    view: ModelView,
    model_type: str,
    dtype: torch.dtype,
    exact: bool,
    sums: Checksums,
    plan: Fp8Plan,
) -> list[Item]:
    """As `plain_items`, with the weights of the plan's linears in FP8.

    Args:
        view: the model.
        model_type: whose names.
        dtype: of what stays in high precision.
        exact: refuse values there that `dtype` cannot hold.
        sums: is told the values that stay in high precision.
        plan: from `make_plan`.
    """
    plain = plain_items(view, model_type, dtype, exact, sums)
    return [
        _fp8_item(view, route, plan) if route.ours in plan.chosen else item
        for route, item in zip(routes(model_type, view.shape), plain, strict=True)
    ]


def _fp8_item(view: ModelView, route: Route, plan: Fp8Plan) -> Item:
    entries: dict[str, Described] = {}
    for name, (rows, columns) in zip(route.theirs, route.shapes, strict=True):
        entries[name] = Described((rows, columns), E4M3.dtype)
        if plan.mode == "blockwise":
            blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
            entries[f"{name}_scale_inv"] = Described(blocks, torch.float32)
            continue
        entries[f"{name}_scale"] = Described((), torch.float32)
        if plan.mode == "static":
            module = name.removesuffix(".weight")
            entries[f"{module}.input_scale"] = Described((), torch.float32)

    def produce() -> Sequence[Tensor]:
        ours = view.read(route.ours)
        tensors: list[Tensor] = []
        scale = weight_scale(view, route.ours, ours)
        for part in route.split(ours):
            if plan.mode == "blockwise":
                blocks = quantize_blocks(part, (BLOCK, BLOCK), E4M3, _BLOCKWISE)[0]
                tensors += [blocks.data, blocks.scale_inv]
                continue
            tensors += [quantize(part, scale, E4M3), 1.0 / scale]
            if plan.mode == "static":
                assert view.read_scale is not None
                tensors.append(1.0 / view.read_scale(_scale_name(route.ours, "input")))
        return tensors

    return Item(entries, produce)


def weight_scale(view: ModelView, name: str, weight: Tensor) -> Tensor:
    """The checkpoint's scale of a weight; the tensor's own where there is none or it saturates."""
    amax = compute_amax(weight)
    if not bool(amax.isfinite()):
        raise CheckpointError(f"{view.path}: {name} holds values that are not finite")
    stored = _scale_name(name, "weight")
    if stored in view.scales and view.read_scale is not None:
        scale = view.read_scale(stored)
        if bool(amax * scale <= E4M3.max):
            return scale
    return current_scale(amax, E4M3)


def verify_fp8(
    view: ModelView, folder: Path, model_type: str, plan: Fp8Plan, dtype: torch.dtype
) -> str:
    """Decode what was written and compare it with the source within the rounding of E4M3.

    Returns:
        A line that says what was compared.

    Raises:
        CheckpointError: a name, a value or a factor is wrong.
    """
    files = SafetensorsFolder(folder)
    expected = {
        name
        for item in fp8_items(view, model_type, dtype, False, Checksums(view.shape), plan)
        for name in item.entries
    }
    if files.entries.keys() != expected:
        different = ", ".join(sorted(files.entries.keys() ^ expected)[:5])
        raise CheckpointError(f"verification failed: {folder} has other tensors: {different}")
    count = 0
    for route in routes(model_type, view.shape):
        parts = route.split(view.read(route.ours))
        for name, part in zip(route.theirs, parts, strict=True):
            stored = files.read(name)
            if route.ours not in plan.chosen:
                good = torch.equal(stored, part.to(dtype))
            else:
                good = _within_rounding(files, name, stored, part)
                count += 1
            if not good:
                raise CheckpointError(f"verification failed: {name} is not the source's value")
    return (
        f"verified: {count} FP8 weights decode to the source within half a step of E4M3, "
        f"{len(expected)} tensors in all"
    )


def _within_rounding(files: SafetensorsFolder, name: str, codes: Tensor, part: Tensor) -> bool:
    """|decoded - x| <= 2^-4 |x|, or half of the smallest step where x is subnormal."""
    blocks = f"{name}_scale_inv"
    if blocks in files.entries:
        quantized = QuantizedTensor(codes, files.read(blocks), E4M3, block=(BLOCK, BLOCK))
    else:
        quantized = QuantizedTensor(codes, files.read(f"{name}_scale"), E4M3)
    factors = quantized.spread_scale_inv()
    x = part.float()
    difference = (quantized.dequantize(torch.float32) - x).abs()
    # A hair more than half a step: scale and factor are rounded themselves.
    bound = torch.maximum(x.abs() * 2.0**-4, factors * (E4M3.smallest_subnormal / 2))
    return bool((difference <= bound * (1 + 1e-5)).all())


def write_scales(view: ModelView, target: Path, advance: Callable[[int], None]) -> int:
    """Write the scale state as it is into `fp8_scales.safetensors`; return the tensors written.

    Raises:
        CheckpointError: there is none.
    """
    if not view.scales or view.read_scale is None:
        raise CheckpointError(f"--fp8 scales: {view.path} holds no FP8 scale state")
    values = {name: view.read_scale(name) for name in sorted(view.scales)}
    entries = {name: Described(tuple(v.shape), v.dtype) for name, v in values.items()}
    writer = SafetensorsWriter(target / SCALES_NAME, entries)
    try:
        for name, value in values.items():
            writer.write(name, value)
            advance(value.nbytes)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    return len(values)
