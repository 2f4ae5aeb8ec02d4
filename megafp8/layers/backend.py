"""The seam between the model and the engine of its layers (native, or TransformerEngine).

A backend makes the modules whose arithmetic the precision plan governs. Both backends give the same
module names, parameter names (canonical), scale state and metrics.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megafp8.layers.parameters import ParameterFactory
from megafp8.numerics import Recipe, ScaleRegistry
from megafp8.numerics.kernels import EAGER, KernelChoice
from megafp8.parallel.fp8_weights import WeightCast
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pipeline import DeferredWeightGradients


@dataclass(frozen=True)
class LinearOptions:
    """Everything a linear layer is told at construction.

    Attributes:
        name: canonical module name, e.g. "decoder.layers.0.mlp.linear_fc1".
        mode: "column" (output features split over tp) or "row" (input features split).
        fp8: whether its GEMMs can run in FP8, and start so.
        bias: whether it has a bias.
    """

    name: str
    mode: str
    fp8: bool
    bias: bool


@dataclass(frozen=True)
class NormOptions:
    """Everything a norm is told at construction.

    Attributes:
        name: canonical module name, e.g. "decoder.layers.0.input_layernorm".
        kind: "LayerNorm" or "RMSNorm".
        epsilon: added to the variance or the mean square.
    """

    name: str
    kind: str
    epsilon: float


@dataclass(frozen=True)
class CoreOptions:
    """Everything an attention core is told at construction.

    Attributes:
        name: canonical module name, "decoder.layers.N.self_attention.core_attention".
        num_heads, num_groups, head_dim: global sizes; groups are KV heads.
        dropout: probability on attention weights.
        window_left: earlier positions that a query sees beside itself; None for all of them.
        fp8: whether its products run in FP8.
    """

    name: str
    num_heads: int
    num_groups: int
    head_dim: int
    dropout: float
    window_left: int | None
    fp8: bool = False


@dataclass(frozen=True)
class LayerContext:
    """What all layers of one pipeline stage share.

    Attributes:
        mesh: the grid and its groups.
        factory: makes parameters by canonical name.
        registry: scale state of the rank's FP8 tensors (None without FP8).
        recipe: FP8 recipe (None without FP8).
        compute_dtype: dtype of activations.
        sequence_parallel: norms and dropout work on [s/tp, b, h].
        fp8_gather: gathers over tp carry FP8 payloads.
        fp8_reduce: reduce-scatters over tp of FP8 linears carry FP8 payloads.
        fp8_param_gather: FSDP gathers the weights of FP8 linears as FP8 codes.
        cache_weights: parameters stay gathered over a step, so FP8 casts of weights may be kept.
        deferred: queue of weight gradients of a zero-bubble schedule, else None.
        norm_impl: kernels of the norms, "native" or "apex".
        kernels: what quantizes in the native backend.
        fp32_wgrad: FP8 linears give weight gradients in fp32, else in the compute dtype.
    """

    mesh: Mesh
    factory: ParameterFactory
    registry: ScaleRegistry | None
    recipe: Recipe | None
    compute_dtype: torch.dtype
    sequence_parallel: bool
    fp8_gather: bool
    fp8_reduce: bool
    fp8_param_gather: bool
    cache_weights: bool
    deferred: DeferredWeightGradients | None
    norm_impl: str = "native"
    kernels: KernelChoice = EAGER
    fp32_wgrad: bool = False

    def precision(self, fp8: bool) -> str:
        """The name of a layer's precision: "fp8", else that of the compute dtype, as "bf16"."""
        return "fp8" if fp8 else _PRECISION_NAMES[self.compute_dtype]


_PRECISION_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class SwitchableLayer(Protocol):
    """A layer of either backend whose precision changes between two training steps.

    Attributes:
        precision: of its GEMMs at present, as `LayerContext.precision` names it.
        weight_cast: how FSDP gathers its weight while it is FP8; None if never as FP8 codes.
    """

    precision: str
    weight_cast: WeightCast | None

    def set_precision(self, precision: str) -> None:
        """Compute in another precision from the next forward on; see `Model.set_precision`.

        Call between two training steps, when no backward is outstanding. In high precision nothing
        is recorded of its tensors, whose scales and windows stay as they are; back in FP8 it goes
        on with them, as a run does that loads them from a checkpoint.

        Raises:
            PrecisionError: another precision than its own for a layer that was not made for FP8.
        """
        ...


class Backend(Protocol):
    """Makes linear layers, norms and attention cores."""

    name: str

    def linear(self, context: LayerContext, options: LinearOptions) -> nn.Module:
        """A tensor-parallel linear: [s(/tp), b, in] -> [s(/tp), b, out(/tp)].

        It is a `SwitchableLayer`, whatever its precision.
        """
        ...

    def norm(self, context: LayerContext, name: str, kind: str, epsilon: float) -> nn.Module:
        """LayerNorm or RMSNorm over the last dim, replicated over tp."""
        ...

    def norm_linear(
        self, context: LayerContext, norm: NormOptions, linear: LinearOptions
    ) -> tuple[nn.Module, nn.Module]:
        """A norm and the column-parallel linear that alone takes its output, as `linear(norm(x))`.

        Each has its own parameters. A backend may leave the norm's arithmetic to the linear: the
        norm then hands on its input.
        """
        ...

    def attention_core(self, context: LayerContext, options: CoreOptions) -> nn.Module:
        """Causal attention, called with (q, k, v, key) and without parameters.

        q [s, b, heads/tp, d], k and v [s, b, groups/tp, d], key a `MicroBatchKey` -> [s, b,
        heads/tp * d].
        """
        ...

    def fused_mlp(
        self, fc1: nn.Module, fc2: nn.Module, swiglu: bool
    ) -> Callable[[Tensor, Any, Any], Tensor] | None:
        """One function for fc1, activation and fc2 (without fc2's bias), or None.

        It holds while both linears are FP8.
        """
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """What the forward of a stage runs in, once per micro-batch."""
        ...

    def recompute_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """(around the first forward, around the second) of a part recomputed inside a scope."""
        ...
