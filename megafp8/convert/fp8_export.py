"""Hugging Face folders with weights in FP8, as vLLM and SGLang read them.

    static      <linear>.weight F8_E4M3, .weight_scale and .input_scale fp32 0-dim
    dynamic     the same without .input_scale
    blockwise   .weight_scale_inv fp32, one factor for each block of 128x128

All factors multiply the stored codes (or the engine's activations) back: they are `scale_inv` here.
Per-tensor weights of q, k and v (gate and up) come from one tensor of ours and share its scale, as
in training; engines that fuse them again need not requantize.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megafp8.convert.hf_names import LLAMA_FAMILY, routes
from megafp8.convert.items import Item, Target
from megafp8.convert.routes import Described, Route
from megafp8.convert.safetensors_files import SafetensorsFolder
from megafp8.convert.view import ModelView
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

IN_BLOCKS = "blockwise"  # a mode, named after the recipe whose weights it writes
BAKED = ("static", "dynamic", IN_BLOCKS)
_RECIPE = Recipe(name=IN_BLOCKS)
BLOCK = _RECIPE.spec.block("weight", "features")


class Fp8Export:
    """Which linears of an export are FP8: those with scale state, all where there is none.

    Args:
        view: the model.
        model_type: whose names.
        mode: one of BAKED.

    Attributes:
        chosen: our names of their weights.
        ignored: Hugging Face modules that stay in high precision.

    Raises:
        CheckpointError: GPT-2's layout, or `static` without the inputs' scales.
    """

    def __init__(self, view: ModelView, model_type: str, mode: str) -> None:
        if model_type not in LLAMA_FAMILY:
            raise CheckpointError(
                f"--fp8 {mode}: {model_type} has no FP8 layout; allowed: none, scales"
            )
        self.view, self.mode = view, mode
        self._routes = routes(model_type, view.shape)
        linears = {spec.name for spec in view.shape.parameters() if spec.kind == "linear"}
        with_state = {name for name in linears if _scale_name(name, "input") in view.scales}
        if mode == "static" and not with_state:
            raise CheckpointError(
                f"--fp8 static: {view.path} holds no FP8 scale state of inputs; allowed: dynamic, "
                "blockwise (or a checkpoint of an FP8 run)"
            )
        self.chosen = with_state or linears
        self.ignored = [] if view.shape.tied else ["lm_head"]
        self.ignored += [
            theirs.removesuffix(".weight")
            for route in self._routes
            if route.ours in linears - self.chosen
            for theirs in route.theirs
        ]

    def config(self) -> dict[str, Any]:
        """Field `quantization_config` of `config.json`."""
        values: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "static" if self.mode == "static" else "dynamic",
        }
        if self.mode == IN_BLOCKS:
            values |= {"fmt": "e4m3", "weight_block_size": list(BLOCK)}
        if self.ignored:
            # vLLM reads the first name, transformers and SGLang the second.
            values |= {"ignored_layers": self.ignored, "modules_to_not_convert": self.ignored}
        return {"quantization_config": values}

    def items(self, target: Target) -> list[Item]:
        """As `target.items`, with the weights of the chosen linears in FP8."""
        return [
            self._item(route) if route.ours in self.chosen else plain
            for route, plain in zip(self._routes, target.items(self._routes), strict=True)
        ]

    def _item(self, route: Route) -> Item:
        entries: dict[str, Described] = {}
        for name, (rows, columns) in zip(route.theirs, route.shapes, strict=True):
            entries[name] = Described((rows, columns), E4M3.dtype)
            if self.mode == IN_BLOCKS:
                blocks = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
                entries[f"{name}_scale_inv"] = Described(blocks, torch.float32)
                continue
            entries[f"{name}_scale"] = Described((), torch.float32)
            if self.mode == "static":
                module = name.removesuffix(".weight")
                entries[f"{module}.input_scale"] = Described((), torch.float32)

        def produce() -> Sequence[Tensor]:
            ours = self.view.read(route.ours)
            tensors: list[Tensor] = []
            scale = self._weight_scale(route.ours, ours)
            for part in route.split(ours):
                if self.mode == IN_BLOCKS:
                    blocks = quantize_blocks(part, BLOCK, E4M3, _RECIPE)[0]
                    tensors += [blocks.data, blocks.scale_inv]
                    continue
                tensors += [quantize(part, scale, E4M3), 1.0 / scale]
                if self.mode == "static":
                    tensors.append(1.0 / self.view.scales[_scale_name(route.ours, "input")])
            return tensors

        return Item(entries, produce)

    def _weight_scale(self, name: str, weight: Tensor) -> Tensor:
        """The checkpoint's scale of a weight; the tensor's own where none is or it saturates."""
        amax = compute_amax(weight)
        if not bool(amax.isfinite()):
            raise CheckpointError(f"{self.view.path}: {name} holds values that are not finite")
        scale = self.view.scales.get(_scale_name(name, "weight"))
        if scale is not None and bool(amax * scale <= E4M3.max):
            return scale
        return current_scale(amax, E4M3)

    def verify(self, target: Target) -> str:
        """Decode what was written and compare it with the source within the rounding of E4M3.

        Returns:
            A line that says what was compared.

        Raises:
            CheckpointError: a name, a value or a factor is wrong.
        """
        files = SafetensorsFolder(target.folder)
        expected = {name for item in self.items(target) for name in item.entries}
        if files.entries.keys() != expected:
            different = ", ".join(sorted(files.entries.keys() ^ expected)[:5])
            raise CheckpointError(
                f"verification failed: {target.folder} has other tensors: {different}"
            )
        count = 0
        for route in self._routes:
            parts = route.split(self.view.read(route.ours))
            for name, part in zip(route.theirs, parts, strict=True):
                stored = files.read(name)
                if route.ours not in self.chosen:
                    good = torch.equal(stored, part.to(target.dtype))
                else:
                    good = _within_rounding(files, name, stored, part)
                    count += 1
                if not good:
                    raise CheckpointError(f"verification failed: {name} is not the source's value")
        return (
            f"verified: {count} FP8 weights decode to the source within half a step of E4M3, "
            f"{len(expected)} tensors in all"
        )


def _scale_name(weight: str, role: str) -> str:
    return f"fp8.{weight.removesuffix('.weight')}.{role}.scale"


def _within_rounding(files: SafetensorsFolder, name: str, codes: Tensor, part: Tensor) -> bool:
    """|decoded - x| <= 2^-4 |x|, or half of the smallest step where x is subnormal."""
    blocks = f"{name}_scale_inv"
    if blocks in files.entries:
        quantized = QuantizedTensor(codes, files.read(blocks), E4M3, block=BLOCK)
    else:
        quantized = QuantizedTensor(codes, files.read(f"{name}_scale"), E4M3)
    factors = quantized.spread_scale_inv()
    x = part.float()
    difference = (quantized.dequantize(torch.float32) - x).abs()
    # A hair more than half a step: scale and factor are rounded themselves.
    bound = torch.maximum(x.abs() * 2.0**-4, factors * (E4M3.smallest_subnormal / 2))
    return bool((difference <= bound * (1 + 1e-5)).all())
