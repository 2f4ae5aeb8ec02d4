"""FSDP2 over the data-parallel axes: fp32 master shards, compute-dtype gathers, fp32 reductions.

Blocks may gather weights as FP8 codes and reduce gradients in FP8, see `Fp8Wires`.

FSDP2 is used at every size, also one rank, so that there is a single path for master weights and
gradient accumulation. Reductions are plain sums: the loss is divided once, by tokens, at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from megafp8.config import ParameterSpec
from megafp8.numerics import E4M3, decode_row, encode_rows, sum_rows
from megafp8.parallel.collectives import all_gather_single, reduce_scatter_single
from megafp8.parallel.fp8_weights import WeightCast, gather_in_fp8
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.traffic import Traffic


class _Allocating:
    """FSDP2's allocation part of a custom collective: a fresh buffer per call."""

    def __init__(self, traffic: Traffic, kind: str) -> None:
        self.traffic, self.kind = traffic, kind

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedAllGather(_Allocating):
    """FSDP2's default all-gather, counted."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.traffic.gathered(self.kind, output_tensor, group.size())
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _CountedReduceScatter(_Allocating):
    """FSDP2's default reduce-scatter, counted."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.traffic.gathered(self.kind, input_tensor, group.size())
        return reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


class Fp8ReduceScatter(_Allocating):
    """FSDP2's reduce-scatter of gradients with FP8 bytes on the wire (`--fp8-grad-reduce`).

    One all-to-all, then an fp32 sum in rank order: the bits depend on no arrival order. A rank's
    own part is added uncast. An inf or NaN arrives as NaN, so that the gradient norm shows it.

    With error feedback the rank keeps what the casts of this reduction lost and adds it to the
    next one: fp32, as large as the module's whole gradient on this tp rank.
    """

    def __init__(self, traffic: Traffic, kind: str, error_feedback: bool) -> None:
        super().__init__(traffic, kind)
        self.error_feedback = error_feedback
        self.residual: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` [n] from all ranks' `input_tensor` [size * n], both fp32."""
        assert op == dist.ReduceOp.SUM and input_tensor.dtype == torch.float32
        size, rank = group.size(), group.rank()
        rows = input_tensor.view(size, -1)  # [size, n], row r for rank r
        if self.residual is not None:
            rows.add_(self.residual)
        payload = encode_rows(rows, E4M3)  # uint8 [size, payload_bytes(n)]
        received = torch.empty_like(payload)
        self.traffic.gathered(self.kind, payload, size)
        # FSDP2 calls this in a stream of its own, as it does its own reduce-scatter.
        dist.all_to_all_single(received, payload, group=group)
        output_tensor.copy_(sum_rows(received, rows[rank], rank, E4M3))
        if self.error_feedback:
            self._keep_losses(rows, payload, rank)

    def forget(self) -> None:
        """Drop what was kept: it belongs to a gradient that was not used."""
        self.residual = None

    def _keep_losses(self, rows: Tensor, payload: Tensor, rank: int) -> None:
        """What travelled as something else than it was; nothing of a faulty gradient is kept."""
        if self.residual is None:
            self.residual = torch.zeros_like(rows)
        for place, row in enumerate(rows):
            if place != rank:
                lost = row - decode_row(payload[place], row.numel(), E4M3)
                # An inf kept here would spoil every later step of the run.
                self.residual[place] = torch.where(lost.isfinite(), lost, 0.0)


@dataclass(frozen=True)
class Fp8Wires:
    """What of a module's FSDP traffic is FP8.

    Attributes:
        grad_reduce: its gradients are reduced in FP8.
        error_feedback: with what a cast lost carried over to the next.
        weights: parameters gathered as codes, by name in the module.
    """

    grad_reduce: bool = False
    error_feedback: bool = False
    weights: Mapping[str, WeightCast] = field(default_factory=dict)


def shard_module(
    module: nn.Module,
    prefix: str,
    specs: Mapping[str, ParameterSpec],
    mesh: Mesh,
    kind: str,
    compute_dtype: torch.dtype,
    fp8: Fp8Wires | None = None,
) -> Fp8ReduceScatter | None:
    """Apply `fully_shard` to one module (its own parameters and those of unwrapped children).

    Args:
        module: holds DTensor parameters on the tp axis, fp32.
        prefix: of its parameters' canonical names, before their names in the module.
        specs: by canonical name; they say which dimension is split.
        mesh: gives the fsdp (or replicate x fsdp) axes.
        kind: "block" or "other", the traffic kind of its gathers and reductions.
        compute_dtype: dtype of the gathered parameters.
        fp8: what travels as FP8; nothing by default.

    Returns:
        The FP8 reduction of its gradients, if it has one.
    """
    wires = fp8 or Fp8Wires()
    dims = {p: specs[prefix + name].fsdp_dim for name, p in module.named_parameters()}
    fully_shard(
        module,
        mesh=mesh.fsdp_mesh,
        reshard_after_forward=mesh.layout.reshard_after_forward,
        # Fused gate and up [2, f, h] are split along h: each rank keeps rows of both halves.
        shard_placement_fn=lambda p: Shard(dims[p]),
        # Inputs are not cast: loss masks and rotary tables stay fp32.
        mp_policy=MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    )
    assert isinstance(module, FSDPModule)
    traffic = mesh.traffic
    # Sums: the global batch divides the loss once, however many ranks share it.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    # FSDP2 takes any object with these methods; its base classes are not public.
    gather: Any = _CountedAllGather(traffic, f"fsdp_{kind}_all_gather")
    reduce_kind = f"fsdp_{kind}_reduce_scatter"
    reduction = None
    if wires.grad_reduce:
        reduction = Fp8ReduceScatter(traffic, reduce_kind, wires.error_feedback)
    reduce: Any = reduction or _CountedReduceScatter(traffic, reduce_kind)
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(reduce)
    gather_in_fp8(module, wires.weights)
    replicas = mesh.layout.replicate
    if replicas > 1:
        # FSDP2 calls the hook with the tensor it has just all-reduced over the replicas.
        module.set_all_reduce_hook(partial(_count_replica_reduce, traffic, replicas))
    return reduction


def change_gather(module: nn.Module, name: str, cast: WeightCast | None) -> None:
    """Gather a parameter in another way from the next gather on; between two training steps.

    FSDP2 keeps what it has made with the first gather, whose dtype is another one now (torch 2.13
    has no public way to drop that): it is made again, as when the first gather is of this kind.

    Args:
        module: what `shard_module` was applied to.
        name: of a parameter in it.
        cast: how it is cast to FP8 codes; None to gather it in the compute dtype.
    """
    assert isinstance(module, FSDPModule)
    module.reshard()  # evaluation may have left it gathered
    parameter = module.get_parameter(name)
    gather_in_fp8(module, {name: cast})
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for held in group.fsdp_params:
            if held.sharded_param is not parameter:
                continue
            held.all_gather_outputs = []
            # Looks again for the two functions on the shard, which decide what is gathered.
            held._init_extensions()
            gathered = vars(held).pop("_unsharded_param", None)
            if gathered is not None and gathered.grad_dtype == torch.float32:
                take_fp32_gradients(module, name)


def _count_replica_reduce(traffic: Traffic, replicas: int, tensor: Tensor) -> None:
    traffic.reduced("dp_all_reduce", tensor, replicas)


def take_fp32_gradients(module: nn.Module, only: str | None = None) -> None:
    """Let autograd hand this FSDP module's gradients over in fp32 instead of the compute dtype.

    FSDP2 reduces all gradients of a module in one buffer of one dtype, so this holds for all of its
    parameters (`only` names one whose others have been told before). It makes the gathered
    parameters when they are first used and keeps them, so they are told in a hook after the first
    gather (torch 2.13; `grad_dtype` came with 2.10).
    """

    # Gathered parameters do not exist before the first gather, which comes with the first forward.
    def tell(module: nn.Module, _: Any) -> None:
        told = module.parameters() if only is None else [module.get_parameter(only)]
        for parameter in told:
            parameter.grad_dtype = torch.float32
        handle.remove()

    handle = module.register_forward_pre_hook(tell)


def begin_micro_batch(module: nn.Module, last: bool, keep_gathered: bool) -> None:
    """Set how FSDP2 treats the backward of the next micro-batch (without pipeline).

    With parameters kept gathered, gradients accumulate unsharded in fp32 and are reduced once, with
    the last micro-batch. With resharding (whose point is memory) each micro-batch is reduced to
    shards, and replicas (HSDP) add theirs with the last one.
    """
    assert isinstance(module, FSDPModule)
    if keep_gathered:
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last)
    else:
        # Shards add up in place; only their sum over the replicas waits for the last micro-batch.
        module.set_requires_all_reduce(last)
    module.set_is_last_backward(last)
