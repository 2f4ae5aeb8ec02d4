"""FSDP gathers of FP8 weights as one byte a value (`--fp8-param-gather`).

    fp32 shard --cast with the weight's scale--> codes --all-gather--> Fp8Weight, used as it is

FSDP2 asks a shard for its bytes through two functions, `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, which it looks up on the shard's local tensor. They are attached to that
plain fp32 tensor (FSDP2 looks for them again when it starts, for this very use), so optimizer,
checkpoints and norms meet ordinary tensors; only the gathered weight is of a class of its own.

All shards of a weight are cast with one scale: the registry's, whose amax is the maximum over the
shards. Codes are those of the fp32 masters; without the flag a weight is gathered in BF16 and then
cast, which rounds twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megafp8.errors import PrecisionError
from megafp8.numerics import QuantizedTensor, ScaleRegistry, quantize

_aten = torch.ops.aten
# What FSDP2, DTensor and a layer's reshape do with a gathered weight.
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.view.default,
}


@dataclass(frozen=True)
class WeightCast:
    """How one weight is cast.

    Attributes:
        registry: holds its scale.
        index: of the weight in it.
    """

    registry: ScaleRegistry
    index: int


class Fp8Weight(torch.Tensor):
    """A gathered weight: FP8 codes under the dtype in which its gradient is computed.

    Nothing can be computed with it but `quantized`.

    Attributes:
        data8: codes, uint8, of the weight's shape; FSDP2 frees and refills their memory.
        cast: where the scale is.
        version: of the registry when the codes were made.
    """

    data8: Tensor
    cast: WeightCast
    version: int

    @staticmethod
    def __new__(cls, data8: Tensor, cast: WeightCast, version: int, dtype: torch.dtype) -> Any:
        """Make a tensor without memory of its own."""
        weight = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, data8.size(), strides=data8.stride(), dtype=dtype, device=data8.device
        )
        weight.data8, weight.cast, weight.version = data8, cast, version
        return weight

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Fp8Weight({list(self.shape)}, {self.cast.registry.keys[self.cast.index][0]})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Views are views of the codes; a gradient of zeros is an ordinary tensor."""
        weight = args[0]
        if func in _VIEWS:
            data8 = func(weight.data8, *args[1:], **(kwargs or {}))
            return Fp8Weight(data8, weight.cast, weight.version, weight.dtype)
        # Autograd makes zeros of it where a weight got no gradient.
        if func is _aten.zeros_like.default:
            return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        raise PrecisionError(f"{func} on a weight that was gathered in FP8: it is only multiplied")

    def quantized(self) -> QuantizedTensor:
        """The codes with their scale.

        The registry's own scale is the one they were cast with: scales move once, after the
        optimizer step, when no weight is gathered.
        """
        registry, index = self.cast.registry, self.cast.index
        assert self.version == registry.version, "weight gathered before the last scale update"
        fmt = registry.format_of(index)
        return QuantizedTensor(self.data8.view(fmt.dtype), registry.scale_inv_of(index), fmt)


def gather_in_fp8(module: nn.Module, casts: Mapping[str, WeightCast | None]) -> None:
    """Make FSDP2 gather the named parameters of a sharded module as FP8 codes; None undoes it."""
    for name, cast in casts.items():
        parameter = module.get_parameter(name)
        assert isinstance(parameter, DTensor)
        shard: Any = parameter._local_tensor
        if cast is not None:
            _attach(shard, cast)
        else:
            del shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather


def _attach(shard: Any, cast: WeightCast) -> None:
    registry, index = cast.registry, cast.index

    # The signatures are FSDP2's; it counts the parameters.
    def fsdp_pre_all_gather(
        mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], int]:
        codes = quantize(shard, registry.scale_of(index), registry.format_of(index))
        # NCCL and gloo move bytes; neither knows every float8 type.
        codes = codes.view(torch.uint8)
        # Only dim 0 may be uneven; every rank sends as many rows as the first has.
        # rows that a smaller last shard lacks
        missing = -(-outer_size[0] // mesh.size()) - codes.shape[0]
        if codes.shape[1:] == outer_size[1:] and missing > 0:
            codes = torch.cat((codes, codes.new_zeros(missing, *codes.shape[1:])))
        # The version travels beside the codes, so that a gather from before an update is noticed.
        return (codes,), registry.version

    def fsdp_post_all_gather(
        outputs: tuple[Tensor, ...], version: int, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if out is None:
            # Flat, in final order: FSDP2 gives it the weight's shape.
            return Fp8Weight(outputs[0].view(-1), cast, version, dtype), ()
        out._local_tensor.version = version  # its memory has just been filled again
        return None

    shard.fsdp_pre_all_gather = fsdp_pre_all_gather
    shard.fsdp_post_all_gather = fsdp_post_all_gather
