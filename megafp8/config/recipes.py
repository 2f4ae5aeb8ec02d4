"""The FP8 recipes, a row each: all that is decided by which recipe runs is a property of its row.

A new recipe is a name in `RecipeName`, a row in the table, and kernels where no other recipe casts
the same way. Imports no torch, so that flags, plans and dry runs ask here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

RecipeName = Literal["delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"]
Axis = Literal["features", "tokens"]  # of a matrix [tokens or out features, features]
Block = tuple[int, int]  # (rows, columns) that share a scale; 0: all of them
Version = tuple[int, int]  # a compute capability, or a release of CUDA

# An FP8 GEMM takes operands whose inner and outer dimensions are multiples of 16: 16 bytes are
# what cuBLASLt's FP8 kernels align to. fprop, dgrad and wgrad between them put each of in
# features, out features and tokens in both places. The rule holds on every device, so that a
# configuration that runs on a CPU also runs on a GPU.
GEMM_MULTIPLE = 16

# Fields of section `precision` about scales from earlier steps.
STATE_FIELDS = (
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_scale_cap",
    "fp8_reduce_amax",
    "fp8_amax_window",
    "fp8_nonfinite_amax",
    "fp8_weight_amax",
)


@dataclass(frozen=True)
class MatrixUnits:
    """What multiplies a recipe's operands without decoding them.

    Attributes:
        what: the units or their GEMMs, in words.
        where: which compute capabilities have them, in words.
        lowest: the first compute capability that has them.
        below: the next one that does not; None if all later ones do.
        cuda: the CUDA release that torch has to be built for, or a later one; None for any.
    """

    what: str
    where: str
    lowest: Version
    below: Version | None = None
    cuda: Version | None = None

    def has(self, capability: Version) -> bool:
        """Whether GPUs of a compute capability have them."""
        return self.lowest <= capability and (self.below is None or capability < self.below)


@dataclass(frozen=True)
class TransformerEngineRecipe:
    """What TransformerEngine makes of a recipe.

    Attributes:
        recipe: its class in `transformer_engine.common.recipe`.
        replaced_by: the recipe it takes without a word on GPUs that do not multiply this one.
        attention: whether cuDNN has FP8 attention for it on Hopper.
        user_buffer_rows: multiple that the rows of a gathered user buffer need; 0 if user buffers
            do not gather its operands.
    """

    recipe: str
    replaced_by: RecipeName | None = None
    attention: bool = False
    user_buffer_rows: int = 1


@dataclass(frozen=True)
class RecipeSpec:
    """One recipe.

    Attributes:
        name: of `--fp8-recipe`.
        units: the GPUs that multiply it; others emulate it.
        stateful: scales come from earlier steps; else from the tensor that is cast.
        block_length: elements along what a GEMM sums over that share a scale; 0: all of them, a
            scale a row; None: one scale a tensor.
        square_weights: weights have square blocks, which fprop and dgrad read alike.
        e8m0: scales are stored as exponents in a byte, hence powers of two; else in fp32.
        power_of_2_scales: scales are powers of two unless a flag says otherwise.
        formats: values of `--fp8-format` that its matrix units take, what `auto` takes first.
        wgrad_in_fp8: the recipe of the same casts with weight gradients in FP8; None if this
            recipe has them itself.
        auto: why `--fp8-recipe auto` takes it on the GPUs that multiply it; None if it never does.
            Of several the one furthest down the table is taken.
        transformer_engine: None if TransformerEngine has no such recipe.
    """

    name: RecipeName
    units: MatrixUnits
    stateful: bool = False
    block_length: int | None = None
    square_weights: bool = False
    e8m0: bool = False
    power_of_2_scales: bool = False
    formats: tuple[Literal["hybrid", "e4m3"], ...] = ("hybrid", "e4m3")
    wgrad_in_fp8: RecipeName | None = None
    auto: str | None = None
    transformer_engine: TransformerEngineRecipe | None = None

    @property
    def per_tensor(self) -> bool:
        """Whether a tensor has one scale."""
        return self.block_length is None

    @property
    def per_row(self) -> bool:
        """Whether a row has one scale."""
        return self.block_length == 0

    @property
    def unit(self) -> str:
        """What shares a scale, in words."""
        if not self.block_length:
            return "tensor" if self.per_tensor else "row"
        return f"block of {self.block_length}"

    @property
    def multiple(self) -> int:
        """What in features, out features and tokens of a linear are multiples of, per rank."""
        return math.lcm(GEMM_MULTIPLE, self.block_length or 1)

    @property
    def unused_fields(self) -> tuple[str, ...]:
        """Fields of section `precision` that it has no use for."""
        return () if self.stateful else STATE_FIELDS

    def block(self, role: str, axis: Axis) -> Block:
        """Return the block of an operand [m, k] whose GEMM sums over `axis`.

        fprop sums over a weight's features, dgrad over its rows; wgrad sums over tokens.
        """
        length = self.block_length
        if length is None:
            return (0, 0)
        if role == "weight" and self.square_weights:
            return (length, length)
        return (1, length) if axis == "features" else (length, 1)

    def scale_bytes(self, values: int, features: int) -> int:
        """Return the bytes of scales that travel with `values` codes in rows of `features`."""
        if self.block_length is None:
            return 0
        return (1 if self.e8m0 else 4) * values // (self.block_length or features)


FP8_UNITS = MatrixUnits("FP8 matrix units", "need 8.9", (8, 9))
_ROW_UNITS = MatrixUnits(
    "GEMMs with a scale a row", "are there for 8.9, 9.x and 10.x", (8, 9), (11, 0)
)

_TABLE = (
    RecipeSpec(
        "delayed",
        FP8_UNITS,
        stateful=True,
        auto="it multiplies FP8 with one scale a tensor",
        transformer_engine=TransformerEngineRecipe("DelayedScaling", attention=True),
    ),
    RecipeSpec(
        "tensorwise", FP8_UNITS, transformer_engine=TransformerEngineRecipe("Float8CurrentScaling")
    ),
    RecipeSpec("rowwise", _ROW_UNITS, block_length=0),
    RecipeSpec("rowwise_with_gw_hp", _ROW_UNITS, block_length=0, wgrad_in_fp8="rowwise"),
    RecipeSpec(
        "blockwise",
        MatrixUnits("GEMMs with 128x128 blocks", "need 9.0 (Hopper)", (9, 0), (9, 1), cuda=(12, 9)),
        block_length=128,
        square_weights=True,
        power_of_2_scales=True,
        formats=("e4m3",),
        transformer_engine=TransformerEngineRecipe(
            "Float8BlockScaling", replaced_by="mxfp8", user_buffer_rows=0
        ),
    ),
    RecipeSpec(
        "mxfp8",
        MatrixUnits("MXFP8 matrix units", "need 10.x (Blackwell)", (10, 0), (11, 0)),
        block_length=32,
        e8m0=True,
        power_of_2_scales=True,
        formats=("e4m3",),
        auto="Blackwell multiplies MXFP8",
        transformer_engine=TransformerEngineRecipe("MXFP8BlockScaling", user_buffer_rows=128),
    ),
)
RECIPES: dict[str, RecipeSpec] = {spec.name: spec for spec in _TABLE}
DEFAULT_RECIPE: RecipeName = "delayed"


def recipes_that(holds: Callable[[RecipeSpec], object], between: str = ", ") -> str:
    """Return the names of the recipes with a property, for messages."""
    return between.join(spec.name for spec in _TABLE if holds(spec))
