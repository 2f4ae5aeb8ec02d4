"""The operands of a linear's GEMMs: in the compute dtype, or quantized to FP8."""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megafp8.layers.native.casting import DelayedCasts, for_wgrad
from megafp8.numerics import (
    QuantizedTensor,
    Recipe,
    Role,
    ScaleRegistry,
    dgrad,
    fprop,
    keep_decoded,
    wgrad,
)
from megafp8.numerics.kernels import EAGER, KernelChoice
from megafp8.parallel.collectives import LINEAR_KINDS, CommGroup


class Operands(Protocol):
    """What a linear needs of its operands; an operand is a tensor or a `QuantizedTensor`."""

    keeps_weight: bool
    fp8_wgrad: bool

    def enter(self, role: Role, x: Tensor, gather: bool) -> tuple[Any, Any]:
        """(what to save for wgrad, what fprop or dgrad reads), gathered over tp if asked."""
        ...

    def gather_again(self, x: Any, gather: bool) -> Any:
        """The saved operand as wgrad needs it."""
        ...

    def weight(self, w: Tensor, backward: bool = False) -> Any:
        """The weight operand [n, k], for fprop, or for dgrad."""
        ...

    def data(self, operand: Any) -> Tensor:
        """The tensor to save for backward."""
        ...

    def scale_inv(self, operand: Any) -> Tensor | None:
        """The scale to decode it with, if any."""
        ...

    def wrap(self, role: Role, data: Tensor, scale_inv: Tensor | None) -> Any:
        """A saved tensor as operand again."""
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
    fp8_wgrad = True  # nothing beside the GEMM's own operand is kept for wgrad

    def __init__(self, tp: CommGroup, dtype: torch.dtype) -> None:
        self.tp, self.dtype = tp, dtype

    def __repr__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def enter(self, role: Role, x: Tensor, gather: bool) -> tuple[Tensor, Tensor]:
        """(what to save, what the GEMM reads); gathered over tp along tokens if asked."""
        return x, self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x

    def gather_again(self, x: Tensor, gather: bool) -> Tensor:
        """The saved operand as the GEMM needs it in backward."""
        return self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x

    def weight(self, w: Tensor, backward: bool = False) -> Tensor:
        """The weight operand [n, k]."""
        return w

    def data(self, operand: Tensor) -> Tensor:
        """The tensor to save for backward."""
        return operand

    def scale_inv(self, operand: Tensor) -> None:
        """High-precision operands have no scale."""

    def wrap(self, role: Role, data: Tensor, scale_inv: Tensor | None) -> Tensor:
        """A saved tensor as operand again."""
        return data

    def fprop(self, x: Tensor, w: Tensor) -> Tensor:
        """[m, k] @ [k, n] -> [m, n]."""
        return x @ w.t()

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        """[m, n] @ [n, k] -> [m, k]."""
        return dy @ w

    def wgrad(self, dy: Tensor, x: Tensor) -> Tensor:
        """[n, m] @ [m, k] -> [n, k]."""
        return dy.t() @ x


class Fp8Operands:
    """Operands quantized with the registry's delayed scales.

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
        self.index = {
            role: registry.register(name, role) for role in ("input", "weight", "grad_output")
        }
        self.cast = DelayedCasts(registry, recipe, self.index, kernels)
        self.wgrad_dtype = wgrad_dtype
        self._cached: tuple[tuple[int, bool], QuantizedTensor] | None = None

    def __repr__(self) -> str:
        forward, gradient = self.recipe.forward_format.name, self.recipe.gradient_format.name
        wgrad = "" if self.fp8_wgrad else ", wgrad in high precision"
        return f"fp8 delayed: input {forward}, weight {forward}, grad_output {gradient}{wgrad}"

    def enter(
        self, role: Role, x: Tensor, gather: bool
    ) -> tuple[QuantizedTensor | Tensor, QuantizedTensor]:
        """Quantize x [tokens, features], record its amax, gather it over tp along tokens if asked.

        Returns:
            (what to save for wgrad, what fprop or dgrad reads). They differ under sequence
            parallelism, and with --no-fp8-wgrad, where wgrad takes high-precision operands.
        """
        if not self.fp8_wgrad and role == "grad_output":
            whole = self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x
            return whole, self.cast(role, whole, record=x)
        if gather and not self.fp8_gather:
            whole = self.tp.all_gather(x, LINEAR_KINDS[0])
            full = self.cast(role, whole, record=x, columns=self.fp8_wgrad)
            return (for_wgrad(full) if self.fp8_wgrad else x), full
        local = self.cast(role, x, record=x, columns=self.fp8_wgrad and not gather)
        saved = for_wgrad(local) if self.fp8_wgrad else x
        if not gather:
            return saved, local
        return saved, self._gather(local, columns=self.fp8_wgrad and role == "grad_output")

    def _gather(self, local: QuantizedTensor, columns: bool) -> QuantizedTensor:
        # One scale on all tp ranks (the amax reduction spans them), so only codes travel.
        data = self.tp.all_gather(local.data, LINEAR_KINDS[0])
        full = QuantizedTensor(data, local.scale_inv, local.format)
        return self.cast.with_columns(full) if columns else full

    def gather_again(self, x: QuantizedTensor | Tensor, gather: bool) -> QuantizedTensor | Tensor:
        """The saved operand as wgrad needs it: gathered again unless it was saved whole."""
        if isinstance(x, Tensor):
            return self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x
        return self._gather(x, columns=True) if gather and self.fp8_gather else x

    def weight(self, w: Tensor, backward: bool = False) -> QuantizedTensor:
        """The weight [n, k] in FP8: cast once per step where parameters stay gathered.

        A kept cast brings the transposed copy for dgrad along; else each pass makes what it needs.

        A kept cast belongs to one version of the registry, which changes with every scale update
        and every load, that is, whenever scale or weight can have changed. Evaluation keeps one of
        its own: it records no amax, and training must not find the work done.
        """
        version = (self.registry.version, self.registry.recording)
        if self.keeps_weight and self._cached is not None and self._cached[0] == version:
            return self._cached[1]
        cast = self.cast(
            "weight",
            w,
            record=w if self.recipe.weight_amax == "cast" else None,
            rows=self.keeps_weight or not backward,
            columns=self.keeps_weight or backward,
        )
        if self.keeps_weight:
            cast = replace(cast, scale_inv=cast.scale_inv.clone())
            keep_decoded(cast)
            self._cached = (version, cast)
        return cast

    def data(self, operand: QuantizedTensor | Tensor) -> Tensor:
        """The payload to save for backward."""
        return operand if isinstance(operand, Tensor) else operand.data

    def scale_inv(self, operand: QuantizedTensor | Tensor) -> Tensor | None:
        """The scale to decode the payload with."""
        return None if isinstance(operand, Tensor) else operand.scale_inv

    def wrap(self, role: Role, data: Tensor, scale_inv: Tensor | None) -> QuantizedTensor | Tensor:
        """A saved payload as operand again."""
        if scale_inv is None:
            return data
        return QuantizedTensor(data, scale_inv, self.recipe.format(role))

    def fprop(self, x: QuantizedTensor, w: QuantizedTensor) -> Tensor:
        """[m, k] @ [k, n] -> [m, n], E4M3 x E4M3."""
        return fprop(x, w)

    def dgrad(self, dy: QuantizedTensor, w: QuantizedTensor) -> Tensor:
        """[m, n] @ [n, k] -> [m, k], E5M2 x E4M3."""
        return dgrad(dy, w)

    def wgrad(self, dy: QuantizedTensor | Tensor, x: QuantizedTensor | Tensor) -> Tensor:
        """[n, m] @ [m, k] -> [n, k], E5M2 x E4M3, or both operands in high precision."""
        if isinstance(dy, Tensor) or isinstance(x, Tensor):
            assert isinstance(dy, Tensor) and isinstance(x, Tensor)
            return dy.t() @ x
        return wgrad(dy, x, self.wgrad_dtype)
