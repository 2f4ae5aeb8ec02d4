"""The operands of a linear's GEMMs: in the compute dtype, or in FP8 with one scale a tensor.

Recipes with a scale for each row or block are in `granular.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from megafp8.config.recipes import Axis
from megafp8.layers.native.casting import DelayedCasts, TensorwiseCasts, for_wgrad
from megafp8.numerics import (
    ROLES,
    QuantizedTensor,
    Recipe,
    Role,
    ScaleRegistry,
    dgrad,
    fprop,
    keep_decoded,
    matmul,
    wgrad,
)
from megafp8.numerics.kernels import EAGER, KernelChoice
from megafp8.parallel.collectives import LINEAR_KINDS, CommGroup
from megafp8.parallel.fp8_weights import Fp8Weight

WeightUse = Literal["fprop", "dgrad"]


class Operands(Protocol):
    """What a linear needs of its operands; only the class itself knows what an operand is."""

    keeps_weight: bool

    def enter(self, role: Role, x: Tensor, gather: bool) -> tuple[Any, Any]:
        """(for wgrad, for fprop or dgrad), gathered over tp if asked.

        The first is what is saved of an input (see `gather_again`), and what wgrad reads of an
        output gradient.
        """
        ...

    def gather_again(self, x: Any, gather: bool) -> Any:
        """The saved operand as wgrad needs it."""
        ...

    def weight(self, w: Tensor, use: WeightUse) -> Any:
        """The weight operand [n, k] of fprop or dgrad; of both if weights are kept."""
        ...

    def pack(self, operand: Any) -> tuple[list[Tensor], Any]:
        """(tensors to save for backward, what else `unpack` needs)."""
        ...

    def unpack(self, role: Role, tensors: list[Tensor], rest: Any) -> Any:
        """A saved operand again."""
        ...

    def fprop(self, x: Any, w: Any) -> Tensor:
        """[m, k] @ [k, n] -> [m, n]."""
        ...

    def dgrad(self, dy: Any, w: Any) -> Tensor:
        """[m, n] @ [n, k] -> [m, k]."""
        ...

    def wgrad(self, dy: Any, x: Any) -> Tensor:
        """[n, m] @ [m, k] -> [n, k]."""
        ...


class HighPrecisionOperands:
    """Operands as plain tensors in the compute dtype."""

    keeps_weight = False

    def __init__(self, tp: CommGroup, dtype: torch.dtype) -> None:
        self.tp, self.dtype = tp, dtype

    def __repr__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def enter(self, role: Role, x: Tensor, gather: bool) -> tuple[Tensor, Tensor]:
        """See `Operands`."""
        whole = self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x
        return (x if role == "input" else whole), whole

    def gather_again(self, x: Tensor, gather: bool) -> Tensor:
        """The saved operand as the GEMM needs it in backward."""
        return self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x

    def weight(self, w: Tensor, use: WeightUse = "fprop") -> Tensor:
        """The weight operand [n, k]."""
        return w

    def pack(self, operand: Tensor) -> tuple[list[Tensor], None]:
        """The tensor to save for backward."""
        return [operand], None

    def unpack(self, role: Role, tensors: list[Tensor], rest: None) -> Tensor:
        """A saved tensor as operand again."""
        return tensors[0]

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        """[m, k] @ [k, n] -> [m, n]."""
        return matmul(x, w.t())

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        """[m, n] @ [n, k] -> [m, k]."""
        return matmul(dy, w)

    def wgrad(self, dy: Tensor, x: Tensor) -> Tensor:
        """[n, m] @ [m, k] -> [n, k]."""
        return matmul(dy.t(), x)


class RegisteredOperands:
    """What FP8 operands share, whatever their scales: arguments, indices in the registry, wgrad.

    Args:
        name: canonical module name; its three tensors are registered under it.
        tp: group over which operands are gathered.
        registry: scale state of this rank.
        recipe: formats and flags.
        fp8_gather: gathers carry FP8 bytes; else the compute dtype is gathered and then quantized.
        keeps_weight: the FP8 weight is cast once per step and kept, as parameters stay gathered.
        kernels: what quantizes.
        wgrad_dtype: of weight gradients; fp32 where they are summed in fp32.
    """

    def __init__(
        self,
        name: str,
        tp: CommGroup,
        registry: ScaleRegistry,
        recipe: Recipe,
        fp8_gather: bool,
        keeps_weight: bool,
        kernels: KernelChoice = EAGER,
        wgrad_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.tp, self.registry, self.recipe = tp, registry, recipe
        self.fp8_gather, self.keeps_weight = fp8_gather, keeps_weight
        self.fp8_wgrad = recipe.fp8_wgrad
        self.kernels, self.wgrad_dtype = kernels, wgrad_dtype
        self.index: dict[Role, int] = {role: registry.register(name, role) for role in ROLES}
        self._cached: Any = None  # (version of the registry, the weight in FP8) where it is kept

    def forget_weight(self) -> None:
        """Free the kept cast of the weight, if there is one."""
        self._cached = None

    def wgrad(self, dy: QuantizedTensor | Tensor, x: QuantizedTensor | Tensor) -> Tensor:
        """[n, m] @ [m, k] -> [n, k], FP8 or both operands in high precision."""
        if isinstance(dy, Tensor) or isinstance(x, Tensor):
            assert isinstance(dy, Tensor) and isinstance(x, Tensor)
            return matmul(dy.t(), x)
        if self.recipe.fake_quant:
            return matmul(dy.dequantize().t(), x.dequantize())
        return wgrad(dy, x, self.wgrad_dtype)


class Fp8Operands(RegisteredOperands):
    """Operands with one scale a tensor: the registry's delayed ones."""

    casts: type[DelayedCasts] = DelayedCasts
    _cached: tuple[tuple[int, bool], QuantizedTensor] | None

    @cached_property
    def cast(self) -> DelayedCasts:
        """What quantizes, with this linear's scales."""
        return self.casts(self.registry, self.recipe, self.index, self.kernels, self.tp)

    def __repr__(self) -> str:
        return describe(self.recipe, lambda operand, summed: "tensor")

    def enter(
        self, role: Role, x: Tensor, gather: bool
    ) -> tuple[QuantizedTensor | Tensor, QuantizedTensor]:
        """Quantize x [tokens, features], record its amax, gather it over tp along tokens if asked.

        Returns:
            (for wgrad, for fprop or dgrad). They differ for an input under sequence parallelism,
            and with --no-fp8-wgrad, where wgrad takes high-precision operands.
        """
        if not self.fp8_wgrad and role == "grad_output":
            whole = self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x
            return whole, self.cast(role, whole)
        if gather and not self.fp8_gather:
            # The amax is that of what is cast: other ranks' tokens too, whose amaxes a rank with
            # scales of its own would not learn otherwise.
            whole = self.tp.all_gather(x, LINEAR_KINDS[0])
            full = self.cast(role, whole, columns=self.fp8_wgrad)
            return (for_wgrad(full) if self.fp8_wgrad else x), full
        local = self.cast(role, x, columns=self.fp8_wgrad and not gather, shared=gather)
        if role == "grad_output":
            full = self._gather(local, columns=True) if gather else local
            return full, full
        full = self._gather(local, columns=False) if gather else local
        return (for_wgrad(local) if self.fp8_wgrad else x), full

    def _gather(self, local: QuantizedTensor, columns: bool) -> QuantizedTensor:
        # One scale on all tp ranks, so only codes travel.
        data = self.tp.all_gather(local.data, LINEAR_KINDS[0])
        full = QuantizedTensor(data, local.scale_inv, local.format)
        return self.cast.with_columns(full) if columns else full

    def gather_again(self, x: QuantizedTensor | Tensor, gather: bool) -> QuantizedTensor | Tensor:
        """The saved operand as wgrad needs it: gathered again unless it was saved whole."""
        if isinstance(x, Tensor):
            return self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x
        return self._gather(x, columns=True) if gather and self.fp8_gather else x

    def weight(self, w: Tensor, use: WeightUse = "fprop") -> QuantizedTensor:
        """The weight [n, k] in FP8, for either use: cast once per step where it stays gathered.

        A kept cast belongs to one version of the registry, which changes with every scale update
        and every load, that is, whenever scale or weight can have changed. Evaluation keeps one of
        its own: it records no amax, and training must not find the work done.
        """
        version = (self.registry.version, self.registry.recording)
        if self.keeps_weight and self._cached is not None and self._cached[0] == version:
            return self._cached[1]
        # A kept cast brings a transposed copy for dgrad along; else each use makes what it needs.
        rows, columns = self.keeps_weight or use == "fprop", self.keeps_weight or use == "dgrad"
        if isinstance(w, Fp8Weight):  # gathered as codes
            cast = self.cast.with_columns(w.quantized()) if columns else w.quantized()
            self.registry.observed(self.index["weight"], None, cast)
        else:
            observed = self.recipe.weight_amax == "cast" or not self.recipe.stateful
            cast = self.cast("weight", w, record=observed, rows=rows, columns=columns)
        if self.keeps_weight:
            cast = replace(cast, scale_inv=cast.scale_inv.clone())
            keep_decoded(cast)
            self._cached = (version, cast)
        return cast

    def pack(self, operand: QuantizedTensor | Tensor) -> tuple[list[Tensor], Tensor | None]:
        """The payload to save for backward, and beside it the scale.

        The scale may be a view of the registry: autograd would refuse a saved one once rewritten.
        """
        if isinstance(operand, Tensor):
            return [operand], None
        return [operand.data], operand.scale_inv

    def unpack(
        self, role: Role, tensors: list[Tensor], rest: Tensor | None
    ) -> QuantizedTensor | Tensor:
        """A saved payload as operand again."""
        if rest is None:
            return tensors[0]
        return QuantizedTensor(tensors[0], rest, self.recipe.format(role))

    def fprop(self, x: QuantizedTensor, w: QuantizedTensor) -> Tensor:
        """[m, k] @ [k, n] -> [m, n]."""
        if self.recipe.fake_quant:
            return matmul(x.dequantize(), w.dequantize().t())
        return fprop(x, w)

    def dgrad(self, dy: QuantizedTensor, w: QuantizedTensor) -> Tensor:
        """[m, n] @ [n, k] -> [m, k]."""
        if self.recipe.fake_quant:
            return matmul(dy.dequantize(), w.dequantize())
        return dgrad(dy, w)


class TensorwiseOperands(Fp8Operands):
    """Operands with one scale a tensor, of the tensor itself (current scaling)."""

    casts = TensorwiseCasts


def describe(recipe: Recipe, unit: Callable[[Role, Axis], str]) -> str:
    """What a linear's operands are, for its repr: by role and by GEMM.

    Args:
        recipe: of the linear.
        unit: what shares a scale in an operand of a role in a GEMM that sums over an axis of it.
    """
    names: dict[str, Role] = {"x": "input", "w": "weight", "dy": "grad_output"}
    products = []
    for gemm, sides in _GEMMS.items():
        parts = [
            f"{name}:{recipe.format(names[name]).name}[{unit(names[name], axis)}]"
            for name, axis in sides.items()
        ]
        products.append(f"{gemm} " + " * ".join(parts))
    if not recipe.fp8_wgrad:
        products[2] = "wgrad in high precision"
    roles = ", ".join(f"{role} {recipe.format(role).name}" for role in ROLES)
    scales = " power-of-two scales," if recipe.power_of_2_scales else ""
    fake = ", multiplied as bf16" if recipe.fake_quant else ""
    return f"fp8 {recipe.name}: {roles};{scales} {', '.join(products)}{fake}"


# The axis of each operand that a GEMM sums over; a weight's rows are its out features.
_GEMMS: dict[str, dict[str, Axis]] = {
    "fprop": {"x": "features", "w": "features"},
    "dgrad": {"dy": "features", "w": "tokens"},
    "wgrad": {"dy": "tokens", "x": "tokens"},
}
