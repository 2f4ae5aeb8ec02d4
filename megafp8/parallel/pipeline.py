"""Runs micro-batches through the stages of a rank: torch's pipeline schedules, or a plain loop.

A stage is a module `forward(x, **micro_batch) -> Tensor`: the first takes token ids [b, s], others
the boundary tensor [s(/tp), b, h]; the last returns the micro-batch's summed loss as [1]. Any stage
may return (Tensor, {name: loss}) instead: further losses, scalars that are sums over the tokens as
the main one is, are trained with it and are equal on the ranks of a tp group.
Boundary tensors are BF16 in BF16 and FP8 runs (the compute dtype elsewhere), in both directions;
this is asserted on every tensor that is sent.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from megafp8.errors import TrainingError
from megafp8.parallel.fsdp import begin_micro_batch
from megafp8.parallel.mesh import Mesh

SCHEDULES = {
    "1f1b": schedules.Schedule1F1B,
    "gpipe": schedules.ScheduleGPipe,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zbv": schedules.ScheduleZBVZeroBubble,
}


StageOutput = Tensor | tuple[Tensor, Mapping[str, Tensor]]


@dataclass
class DeferredWeightGradients:
    """Weight-gradient GEMMs that a zero-bubble schedule runs later than the input gradients.

    torch's own split walks the autograd graph twice and would repeat every GEMM, cast and gather.
    Here one backward computes input gradients and queues each weight gradient as a closure; the
    schedule takes the queue of a micro-batch and runs it in its W slot. Each runs exactly once.
    """

    queue: deque[Callable[[], None]] = field(default_factory=deque)

    def take(self) -> Callable[[], None]:
        """Detach the queued work of the backward that just ran, as one function (`dw_builder`)."""
        # A new queue: the next backward fills its own while this one waits for its W slot.
        work, self.queue = self.queue, deque()

        def run() -> None:
            while work:
                work.popleft()()

        return run


class _CountedStage(PipelineStage):
    """A stage that counts what it sends and refuses boundary tensors of another dtype."""

    mesh: Mesh
    boundary_dtype: torch.dtype
    take_losses: Callable[[StageOutput], Tensor]

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        # What travels to the next stage is the tensor alone.
        return self.take_losses(super().forward_maybe_with_nosync(*args, **kwargs))

    def _check(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            tensor = op.tensor
            assert tensor is not None
            _check_boundary(tensor, self.boundary_dtype, self.stage_index)
            self.mesh.traffic.sent("pp_p2p", tensor)
        return ops

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._check(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._check(super().get_bwd_send_ops(bwd_chunk_id))


def _check_boundary(tensor: Tensor, allowed: torch.dtype, stage: int) -> None:
    """Refuse a boundary tensor of another dtype; no assert, since it must also hold under -O."""
    if tensor.dtype != allowed:
        raise TrainingError(f"stage {stage}: boundary tensor is {tensor.dtype}, allowed {allowed}")


class _WithLosses(torch.autograd.Function):
    """A stage's tensor as it is; its backward is the beginning of the further losses', too."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, scale: float, *losses: Tensor) -> Tensor:
        # Each of them is added to the loss that is differentiated: d(loss)/d(it) is the loss scale.
        ctx.gradients = [torch.full_like(loss, scale) for loss in losses]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The tensor's own gradient goes on as it came from the next stage.
        return gradients[0], None, *ctx.gradients


def _scaled_identity(scale: Callable[[], float]) -> Callable[[Tensor, Tensor], Tensor]:
    """The schedule's loss function: the last stage already returns the loss sum."""
    # [1] -> scalar; the factor is asked for at each call, since an FP16 loss scale moves between
    # steps.
    return lambda output, target: output.sum() * scale()


class PipelineRunner:
    """Training and evaluation passes over this rank's stages.

    Args:
        stages: this rank's stage modules in the order of `layout.stage_indices`.
        mesh: the grid.
        schedule: a key of SCHEDULES (ignored without pipeline parallelism).
        boundary: shape of a boundary tensor, [s(/tp), b, h].
        boundary_dtype: dtype of boundary tensors.
        deferred: one queue per stage for zero-bubble schedules, else None.
        extra_losses: names of all further losses that stages return, the same on all ranks.

    Attributes:
        extra_totals: fp64 scalar by name, this rank's sum over the last `train`, unscaled.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: Mesh,
        schedule: str,
        boundary: tuple[int, int, int],
        boundary_dtype: torch.dtype,
        deferred: Sequence[DeferredWeightGradients] | None = None,
        extra_losses: Sequence[str] = (),
    ) -> None:
        self.modules, self.mesh, self.schedule = list(stages), mesh, schedule
        self.boundary, self.boundary_dtype = boundary, boundary_dtype
        self.deferred = deferred
        self.indices = mesh.layout.stage_indices(mesh.pp_rank)
        self.last_index = mesh.layout.num_stages - 1
        self.loss_scale = 1.0
        self.extra_losses = tuple(extra_losses)
        self._reset_totals()
        self._schedules: dict[int, Any] = {}

    @property
    def has_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.last_index in self.indices

    def train(
        self,
        micro_batches: list[dict[str, Tensor]],
        loss_scale: float = 1.0,
        between: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Forward and backward over all micro-batches; gradients are left on the parameters.

        Args:
            micro_batches: dicts of tensors with a leading batch dim: `tokens` and what the stages
                take beside it.
            loss_scale: multiplies the loss before the backward (FP16).
            between: called after the backward of each micro-batch but the last; not with pipeline
                parallelism, where a micro-batch's backward is no end of anything.

        Returns:
            fp64 scalar: the sum of token losses (0 on ranks without the last stage), unscaled.
            Fp32 sums of micro-batches add up exactly in it, in whatever order ranks have them.
        """
        self.loss_scale = loss_scale
        self._reset_totals()
        if self.mesh.layout.pp == 1:
            return self._train_alone(micro_batches, between)
        count = len(micro_batches)
        if count not in self._schedules:
            # Only the newest is kept (a batch ramp changes the count): each holds receive buffers
            # for all its micro-batches.
            self._schedules = {count: self._build_schedule(count)}
        # [b, s] of each micro-batch -> [count * b, s]: the schedule splits along the first
        # dimension again.
        merged = {k: torch.cat([m[k] for m in micro_batches]) for k in micro_batches[0]}
        tokens = merged.pop("tokens")
        losses: list[Tensor] = []
        kwargs: dict[str, Any] = dict(merged)
        if self.has_last:
            # Torch calls the loss function only where it is given targets; ours needs none.
            kwargs |= {"target": torch.zeros(count), "losses": losses}
        # Only the first stage takes tokens; the others receive their input.
        args = (tokens,) if 0 in self.indices else ()
        self._schedules[count].step(*args, return_outputs=False, **kwargs)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)
        for loss in losses:
            total += loss.detach()
        # The losses were multiplied for the backward; what is reported is not.
        return total / loss_scale

    def _reset_totals(self) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)
        self.extra_totals = {name: zero.clone() for name in self.extra_losses}

    def _take_losses(self, output: StageOutput) -> Tensor:
        """Note a stage's further losses and hang their gradients on its tensor."""
        if isinstance(output, Tensor):
            return output
        tensor, losses = output
        for name, loss in losses.items():
            self.extra_totals[name] += loss.detach()
        return _WithLosses.apply(tensor, self.loss_scale, *losses.values())  # type: ignore[return-value]

    def _train_alone(
        self, micro_batches: list[dict[str, Tensor]], between: Callable[[], None]
    ) -> Tensor:
        (module,) = self.modules
        keep = not self.mesh.layout.reshard_after_forward
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)
        for index, micro_batch in enumerate(micro_batches):
            begin_micro_batch(module, index == len(micro_batches) - 1, keep)
            # [b, s] -> [1], the sum over tokens
            loss = self._take_losses(module(micro_batch["tokens"], **_rest(micro_batch))).sum()
            (loss * self.loss_scale if self.loss_scale != 1.0 else loss).backward()
            total += loss.detach()
            if index < len(micro_batches) - 1:
                between()
        return total

    def _build_schedule(self, num_microbatches: int) -> Any:
        layout = self.mesh.layout
        example = torch.empty(
            self.boundary, dtype=self.boundary_dtype, device="meta", requires_grad=True
        )
        # [b, 1]: the schedule looks at the batch alone
        tokens = torch.empty(self.boundary[1], 1, dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        stages = []
        for position, (index, module) in enumerate(zip(self.indices, self.modules, strict=True)):
            stage = _CountedStage(
                module,
                index,
                layout.num_stages,
                self.mesh.world.device,
                # Without requires_grad on the examples the backward would wait for ever.
                input_args=(tokens if index == 0 else example,),
                output_args=(loss if index == self.last_index else example,),
                group=self.mesh.pp.process_group,
                dw_builder=self.deferred[position].take if self.deferred else None,
            )
            stage.mesh, stage.boundary_dtype = self.mesh, self.boundary_dtype
            stage.take_losses = self._take_losses
            stages.append(stage)
        # These take one stage a rank, the others a list of them.
        single = self.schedule in ("1f1b", "gpipe")
        return SCHEDULES[self.schedule](
            stages[0] if single else stages,
            n_microbatches=num_microbatches,
            loss_fn=_scaled_identity(lambda: self.loss_scale),
            # Gradients are divided once, by tokens, after all reductions.
            scale_grads=False,
        )

    @torch.no_grad()
    def evaluate(self, micro_batches: list[dict[str, Tensor]]) -> Tensor:
        """Forward only.

        Returns:
            fp64 scalar: the sum of token losses (0 on ranks without the last stage).
        """
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)
        for output in self.forward(micro_batches):
            total += output.sum()
        return total

    @torch.no_grad()
    def forward(self, micro_batches: list[dict[str, Tensor]]) -> list[Tensor]:
        """Outputs of the last stage per micro-batch ([] on ranks without it)."""
        layout, rank = self.mesh.layout, self.mesh.pp_rank
        owner = {i: r for r in range(layout.pp) for i in layout.stage_indices(r)}
        modules = dict(zip(self.indices, self.modules, strict=True))
        kept: dict[tuple[int, int], Tensor] = {}
        pending: list[tuple[dist.Work | None, Tensor]] = []
        outputs: list[Tensor] = []
        for index, number in forward_order(
            self.indices, layout.pp, self.schedule, len(micro_batches)
        ):
            micro_batch = micro_batches[number]
            if index == 0:
                x = micro_batch["tokens"]
            elif owner[index - 1] == rank:
                # Zbv folds the stages: neighbours may be on this very rank, and nothing travels.
                x = kept.pop((index - 1, number))
            else:
                x = self._receive(owner[index - 1])
            y = self._take_losses(modules[index](x, **_rest(micro_batch)))
            if index == self.last_index:
                outputs.append(y)
            elif owner[index + 1] == rank:
                kept[index, number] = y
            else:
                # The tensor is kept beside its work: gloo reads it until the peer has taken it.
                pending.append((self._send(y, owner[index + 1], index), y))
        for work, _ in pending:
            if work is not None:
                work.wait()
        return outputs

    def _send(self, tensor: Tensor, pp_rank: int, stage: int) -> dist.Work | None:
        _check_boundary(tensor, self.boundary_dtype, stage)
        self.mesh.traffic.sent("pp_p2p", tensor)
        return dist.isend(tensor.contiguous(), group=self.mesh.pp.process_group, group_dst=pp_rank)

    def _receive(self, pp_rank: int) -> Tensor:
        x = torch.empty(self.boundary, dtype=self.boundary_dtype, device=self.mesh.world.device)
        dist.recv(x, group=self.mesh.pp.process_group, group_src=pp_rank)
        return x


def forward_order(
    indices: Sequence[int], pp: int, schedule: str, num_microbatches: int
) -> list[tuple[int, int]]:
    """(stage, micro-batch) in the order in which a rank runs a forward-only pass.

    Stage by stage, so that each is pipelined over micro-batches. NCCL runs a rank's sends and
    receives one after another, each waiting for its peer. In the interleaved schedule the last rank
    sends back to the first, which must have turned to receiving by then: with pp or more
    micro-batches at a time the circle of waiting would close, hence groups of pp - 1.
    """
    size = max(pp - 1, 1) if schedule == "interleaved" else max(num_microbatches, 1)
    order = []
    for start in range(0, num_microbatches, size):
        group = range(start, min(start + size, num_microbatches))
        order += [(index, number) for index in sorted(indices) for number in group]
    return order


def _rest(micro_batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in micro_batch.items() if key != "tokens"}
