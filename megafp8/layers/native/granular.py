"""Operands with a scale for each row or block: rowwise, blockwise and mxfp8.

An input and an output gradient are cast twice, each time from high precision: along features for
fprop and dgrad, along tokens for wgrad. Both casts are made when the tensor is there, so that only
bytes are saved. Under sequence parallelism the scales travel with the codes: a rank's own blocks
are blocks of the whole, as its tokens are a multiple of the block (the precision plan sees to it).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megafp8.config.recipes import Axis
from megafp8.layers.native.operands import RegisteredOperands, WeightUse, describe
from megafp8.numerics import (
    QuantizedTensor,
    Role,
    dgrad,
    fprop,
    keep_decoded,
    matmul,
    quantize_blocks,
)
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

    _cached: tuple[tuple[int, bool], GranularWeight] | None

    def __repr__(self) -> str:
        def unit(role: Role, axis: Axis) -> str:
            rows, columns = self.recipe.spec.block(role, axis)
            if not rows or not columns:
                return "column" if columns else "row"
            return f"{rows}x{columns}"

        return describe(self.recipe, unit)

    def _casts(
        self, role: Role, x: Tensor, blocks: Sequence[tuple[int, int]]
    ) -> list[QuantizedTensor]:
        """Cast x once for each kind of block."""
        recipe = self.recipe
        if self.kernels.fused and x.numel():
            fused = self._by_rows if recipe.spec.per_row else self._by_blocks
            casts, amaxes = fused(role, x, blocks)
        else:
            made = [quantize_blocks(x, block, recipe.format(role), recipe) for block in blocks]
            casts, amaxes = [cast for cast, _ in made], [amax for _, amax in made]
        if self.registry.recording:
            for amax in amaxes:
                self.registry.record(self.index[role], amax)
        return [self.registry.observed(self.index[role], x, cast) for cast in casts]

    def _by_blocks(
        self, role: Role, x: Tensor, blocks: Sequence[tuple[int, int]]
    ) -> tuple[list[QuantizedTensor], list[Tensor]]:
        # Imported here: it imports Triton.
        from megafp8.numerics.kernels.blocks import cast_blocks

        recipe, casts, amaxes = self.recipe, [], []
        for block in blocks:
            cast, amax = cast_blocks(
                x,
                block,
                recipe.format(role),
                mx=recipe.spec.e8m0,
                power_of_2=recipe.power_of_2_scales,
                # Along tokens wgrad (and dgrad of a weight) wants the transposed codes, unless
                # they are gathered first.
                transposed=block[0] > block[1] and self.tp.size == 1,
            )
            casts.append(cast)
            amaxes.append(amax)
        return casts, amaxes

    def _by_rows(
        self, role: Role, x: Tensor, blocks: Sequence[tuple[int, int]]
    ) -> tuple[list[QuantizedTensor], list[Tensor]]:
        from megafp8.numerics.kernels.rows import cast_rows

        # Codes with columns' scales come transposed: they are never gathered (sequence parallelism
        # leaves the weight gradient in high precision).
        by_row, by_column, amax = cast_rows(
            x,
            self.recipe.format(role),
            power_of_2=self.recipe.power_of_2_scales,
            rows=(1, 0) in blocks,
            columns=(0, 1) in blocks,
        )
        found = {(1, 0): by_row, (0, 1): by_column}
        return [cast for block in blocks if (cast := found[block]) is not None], [amax]

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
        block = self.recipe.spec.block
        across, along = block(role, "features"), block(role, "tokens")
        fp8_wgrad, is_input = self.fp8_wgrad, role == "input"
        if gather and (not self.fp8_gather or not (fp8_wgrad or is_input)):
            # What is needed whole in high precision is cast whole.
            whole, mine, gather = self._gather(x), x, False
        else:
            whole = mine = x
        casts = self._casts(role, whole, (across, along) if fp8_wgrad else (across,))
        product = self._gather_cast(casts[0]) if gather else casts[0]
        if not fp8_wgrad:
            return (mine if is_input else whole), product
        other = casts[1]
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
            self.recipe.spec.block("weight", "features"),
            self.recipe.spec.block("weight", "tokens"),
        )
        blocks = {"fprop": forward, "dgrad": backward}
        if not self.keeps_weight:
            blocks = {use: blocks[use]}
        if forward == backward:  # the same codes for both
            (square,) = self._casts("weight", w, (forward,))
            cast = GranularWeight(square, square)
        else:
            made = dict(zip(blocks, self._casts("weight", w, tuple(blocks.values())), strict=True))
            cast = GranularWeight(made.get("fprop"), made.get("dgrad"))
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
            block=self.recipe.spec.block(role, "tokens"),
            power_of_2=self.recipe.power_of_2_scales,
        )

    def fprop(self, x: QuantizedTensor, w: GranularWeight) -> Tensor:
        """[m, k] @ [k, n] -> [m, n]."""
        assert w.fprop is not None
        if self.recipe.fake_quant:
            return matmul(x.dequantize(), w.fprop.dequantize().t())
        return fprop(x, w.fprop)

    def dgrad(self, dy: QuantizedTensor, w: GranularWeight) -> Tensor:
        """[m, n] @ [n, k] -> [m, k]."""
        assert w.dgrad is not None
        if self.recipe.fake_quant:
            return matmul(dy.dequantize(), w.dgrad.dequantize())
        return dgrad(dy, w.dgrad)
