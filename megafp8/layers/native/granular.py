"""Operands with a scale for each row or block: rowwise, blockwise and mxfp8.

An input and an output gradient are cast twice, each time from high precision: along features for
fprop and dgrad, along tokens for wgrad. Both casts are made when the tensor is there, so that only
bytes are saved. Under sequence parallelism the scales travel with the codes: a rank's own blocks
are blocks of the whole, as its tokens are a multiple of the block (the precision plan sees to it).
"""

from dataclasses import dataclass

from torch import Tensor

from megafp8.layers.native.operands import RegisteredOperands, WeightUse, describe
from megafp8.numerics import (
    QuantizedTensor,
    Role,
    block_along,
    dgrad,
    fprop,
    keep_decoded,
    quantize_blocks,
    weight_block,
)
from megafp8.numerics.granular import Axis
from megafp8.parallel.collectives import LINEAR_KINDS


@dataclass
class GranularWeight:
    """A weight as fprop and as dgrad read it; the same object where blocks are square."""

    fprop: QuantizedTensor | None
    dgrad: QuantizedTensor | None


class GranularOperands(RegisteredOperands):
    """Operands of the recipes with several scales a tensor.

    The registry keeps no state for them; it hears every amax, so that a non-finite one is named.
    """

    _cached: tuple[tuple[int, bool], GranularWeight] | None = None

    def __repr__(self) -> str:
        def unit(role: Role, axis: Axis) -> str:
            blocks = weight_block if role == "weight" else block_along
            rows, columns = blocks(self.recipe.name, axis)
            if not rows or not columns:
                return "column" if columns else "row"
            return f"{rows}x{columns}"

        return describe(self.recipe, unit)

    def _cast(self, role: Role, x: Tensor, block: tuple[int, int]) -> QuantizedTensor:
        fmt, recipe = self.recipe.format(role), self.recipe
        if self.kernels.fused and x.numel():
            # Imported here: it imports Triton.
            from megafp8.numerics.kernels.blocks import cast_blocks

            # Along tokens wgrad (and dgrad of a weight) wants the transposed codes, unless they
            # are gathered first.
            columns = block[0] > block[1] and self.tp.size == 1
            cast, amax = cast_blocks(
                x,
                block,
                fmt,
                mx=recipe.name == "mxfp8",
                power_of_2=recipe.power_of_2_scales,
                transposed=columns,
            )
        else:
            cast, amax = quantize_blocks(x, block, fmt, recipe)
        if self.registry.recording:
            self.registry.record(self.index[role], amax)
        return cast

    def _gather(self, x: Tensor) -> Tensor:
        return self.tp.all_gather(x, LINEAR_KINDS[0])

    def _gather_cast(self, mine: QuantizedTensor) -> QuantizedTensor:
        data, scale_inv = self._gather(mine.data), self._gather(mine.scale_inv)
        return QuantizedTensor(
            data, scale_inv, mine.format, block=mine.block, power_of_2=mine.power_of_2
        )

    def enter(
        self, role: Role, x: Tensor, gather: bool
    ) -> tuple[QuantizedTensor | Tensor, QuantizedTensor]:
        """Quantize x [tokens, features] both ways, gather it over tp along tokens if asked.

        Returns:
            (for wgrad, for fprop or dgrad); see `Operands.enter`.
        """
        name = self.recipe.name
        across, along = block_along(name, "features"), block_along(name, "tokens")
        fp8_wgrad, is_input = self.fp8_wgrad, role == "input"
        if gather and (not self.fp8_gather or not (fp8_wgrad or is_input)):
            # What is needed whole in high precision is cast whole.
            whole, mine, gather = self._gather(x), x, False
        else:
            whole = mine = x
        product = self._cast(role, whole, across)
        if gather:
            product = self._gather_cast(product)
        if not fp8_wgrad:
            return (mine if is_input else whole), product
        other = self._cast(role, whole, along)
        if gather and not is_input:
            other = self._gather_cast(other)
        return other, product

    def gather_again(self, x: QuantizedTensor | Tensor, gather: bool) -> QuantizedTensor | Tensor:
        """The saved operand as wgrad needs it: gathered again unless it was saved whole."""
        if isinstance(x, Tensor):
            return self._gather(x) if gather else x
        return self._gather_cast(x) if gather and self.fp8_gather else x

    def weight(self, w: Tensor, use: WeightUse = "fprop") -> GranularWeight:
        """The weight [n, k] for one use; for both, once a step, where it stays gathered.

        See `Fp8Operands.weight` for how long a kept cast is good.
        """
        version = (self.registry.version, self.registry.recording)
        if self.keeps_weight and self._cached is not None and self._cached[0] == version:
            return self._cached[1]
        forward, backward = (
            weight_block(self.recipe.name, "features"),
            weight_block(self.recipe.name, "tokens"),
        )
        same = forward == backward
        cast = GranularWeight(None, None)
        if self.keeps_weight or use == "fprop" or same:
            cast.fprop = self._cast("weight", w, forward)
        if same:
            cast.dgrad = cast.fprop
        elif self.keeps_weight or use == "dgrad":
            cast.dgrad = self._cast("weight", w, backward)
        if self.keeps_weight:
            for operand in (cast.fprop, cast.dgrad):
                if operand is not None and not self.recipe.fake_quant:
                    keep_decoded(operand)
            self._cached = (version, cast)
        return cast

    def pack(self, operand: QuantizedTensor | Tensor) -> tuple[list[Tensor], None]:
        """Codes and scales, to save for backward; or the high-precision tensor."""
        if isinstance(operand, Tensor):
            return [operand], None
        return [operand.data, operand.scale_inv], None

    def unpack(self, role: Role, tensors: list[Tensor], rest: None) -> QuantizedTensor | Tensor:
        """A saved operand again."""
        if len(tensors) == 1:
            return tensors[0]
        data, scale_inv = tensors
        return QuantizedTensor(
            data,
            scale_inv,
            self.recipe.format(role),
            block=block_along(self.recipe.name, "tokens"),
            power_of_2=self.recipe.power_of_2_scales,
        )

    def fprop(self, x: QuantizedTensor, w: GranularWeight) -> Tensor:
        """[m, k] @ [k, n] -> [m, n]."""
        assert w.fprop is not None
        if self.recipe.fake_quant:
            return x.dequantize() @ w.fprop.dequantize().t()
        return fprop(x, w.fprop)

    def dgrad(self, dy: QuantizedTensor, w: GranularWeight) -> Tensor:
        """[m, n] @ [n, k] -> [m, k]."""
        assert w.dgrad is not None
        if self.recipe.fake_quant:
            return dy.dequantize() @ w.dgrad.dequantize()
        return dgrad(dy, w.dgrad)
