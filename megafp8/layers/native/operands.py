"""The operands of a linear's GEMMs: in the compute dtype, or quantized to FP8."""

from typing import Any, Protocol

import torch
from torch import Tensor

from megafp8.numerics import (
    QuantizedTensor,
    Recipe,
    Role,
    ScaleRegistry,
    compute_amax,
    dgrad,
    fprop,
    keep_decoded,
    quantize,
    wgrad,
)
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

    def weight(self, w: Tensor) -> Any:
        """The weight operand [n, k]."""
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

    def weight(self, w: Tensor) -> Tensor:
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
    """

    def __init__(
        self,
        name: str,
        tp: CommGroup,
        registry: ScaleRegistry,
        recipe: Recipe,
        fp8_gather: bool,
        keeps_weight: bool,
    ) -> None:
        self.tp, self.registry, self.recipe = tp, registry, recipe
        self.fp8_gather, self.keeps_weight = fp8_gather, keeps_weight
        self.fp8_wgrad = recipe.fp8_wgrad
        self.index = {
            role: registry.register(name, role) for role in ("input", "weight", "grad_output")
        }
        self._cached: tuple[tuple[int, bool], QuantizedTensor] | None = None

    def __repr__(self) -> str:
        forward, gradient = self.recipe.forward_format.name, self.recipe.gradient_format.name
        wgrad = "" if self.fp8_wgrad else ", wgrad in high precision"
        return f"fp8 delayed: input {forward}, weight {forward}, grad_output {gradient}{wgrad}"

    def _observe(self, role: Role, x: Tensor) -> None:
        if self.registry.recording:
            self.registry.record(self.index[role], compute_amax(x))

    def _quantize(self, role: Role, x: Tensor) -> QuantizedTensor:
        index, fmt = self.index[role], self.recipe.format(role)
        data = quantize(x, self.registry.scale_of(index), fmt)
        return QuantizedTensor(data, self.registry.scale_inv_of(index), fmt)

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
            self._observe(role, whole)
            return whole, self._quantize(role, whole)
        if gather and not self.fp8_gather:
            # The amax is that of what is cast: other ranks' tokens too, whose amaxes a rank with
            # scales of its own would not learn otherwise.
            whole = self.tp.all_gather(x, LINEAR_KINDS[0])
            self._observe(role, whole)
            full = self._quantize(role, whole)
            return (full if self.fp8_wgrad else x), full
        self._observe(role, x)
        local = self._quantize(role, x)
        saved = local if self.fp8_wgrad else x
        return saved, self._gather(local) if gather else local

    def _gather(self, local: QuantizedTensor) -> QuantizedTensor:
        # One scale on all tp ranks (the amax reduction spans them), so only codes travel.
        data = self.tp.all_gather(local.data, LINEAR_KINDS[0])
        return QuantizedTensor(data, local.scale_inv, local.format)

    def gather_again(self, x: QuantizedTensor | Tensor, gather: bool) -> QuantizedTensor | Tensor:
        """The saved operand as wgrad needs it: gathered again unless it was saved whole."""
        if isinstance(x, Tensor):
            return self.tp.all_gather(x, LINEAR_KINDS[0]) if gather else x
        return self._gather(x) if gather and self.fp8_gather else x

    def weight(self, w: Tensor) -> QuantizedTensor:
        """The weight [n, k] in FP8: cast once per step where parameters stay gathered.

        A kept cast belongs to one version of the registry, which changes with every scale update
        and every load, that is, whenever scale or weight can have changed. Evaluation keeps one of
        its own: it records no amax, and training must not find the work done.
        """
        version = (self.registry.version, self.registry.recording)
        if self.keeps_weight and self._cached is not None and self._cached[0] == version:
            return self._cached[1]
        if self.recipe.weight_amax == "cast" and self.registry.recording:
            self.registry.record(self.index["weight"], compute_amax(w))
        cast = self._quantize("weight", w)
        if self.keeps_weight:
            cast = QuantizedTensor(cast.data, cast.scale_inv.clone(), cast.format)
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
        return wgrad(dy, x)
