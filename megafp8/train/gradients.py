"""From what the backward left to one global norm, with every parameter counted once."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megafp8.config import ParameterSpec
from megafp8.layers.parameters import local
from megafp8.model import Model
from megafp8.parallel.mesh import Mesh
from megafp8.train.shards import NamedShard


@dataclass(frozen=True)
class _Entry:
    """One parameter: FSDP2's sharded DTensor, and the optimizer's view of its local fp32 tensor."""

    name: str
    spec: ParameterSpec
    parameter: nn.Parameter
    shard: Tensor
    counts: bool


class Gradients:
    """Gradients of this rank's parameters, as local fp32 shards.

    Args:
        model: this rank's part of the model.
        mesh: the grid.
    """

    def __init__(self, model: Model, mesh: Mesh) -> None:
        self.model, self.mesh = model, mesh
        self.entries: list[_Entry] = []
        for name, parameter in model.parameters.items():
            spec, shard = model.spec(name), local(parameter).detach()
            counts = spec.counts_at(mesh.place)
            self.entries.append(_Entry(name, spec, parameter, shard, counts))
        self._by_name = {entry.name: entry for entry in self.entries}
        self._partial, self._averaged = self._incomplete_over_tp()
        # Where each parameter's square goes in `_global_norm`: the same place at every layout.
        names = [*model.specs, *model.copies]
        places = {name: place for place, name in enumerate(names)}
        self._filled = [entry for entry in self.entries if entry.shard.numel()]
        device = mesh.world.device
        self._places = torch.tensor([places[e.name] for e in self._filled], device=device)
        self._weights = torch.tensor(
            [float(e.counts) for e in self._filled], dtype=torch.float64, device=device
        )
        self._num_places = len(names)

    def named_shards(self) -> list[NamedShard]:
        """The local fp32 shards for `build_optimizer`, in a fixed order."""
        return [
            NamedShard(e.name, e.shard, e.spec.decays, cast(DTensor, e.parameter))
            for e in self.entries
        ]

    @torch.no_grad()
    def collect(self) -> None:
        """Take the reduced gradients from FSDP2 and complete them over tp and the tied stages."""
        for entry in self.entries:
            gradient = entry.parameter.grad
            entry.parameter.grad = None
            if gradient is None:
                entry.shard.grad = torch.zeros_like(entry.shard)
            else:
                # A gradient may be a strided piece of FSDP2's reduction buffer.
                entry.shard.grad = local(gradient).contiguous()
        self._complete_over_tp()
        self._sum_tied()

    def _complete_over_tp(self) -> None:
        """One all-reduce of one flat fp32 tensor for all replicated parameters together."""
        grads = [self._grad(entry) for entry in self._partial + self._averaged]
        if self.mesh.tp.size == 1 or not grads:
            return
        for grad in grads[len(self._partial) :]:
            grad.div_(self.mesh.tp.size)
        flat = torch.cat([g.flatten() for g in grads])
        self.mesh.tp.all_reduce(flat, "tp_all_reduce")
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view(grad.shape))

    def _incomplete_over_tp(self) -> tuple[list[_Entry], list[_Entry]]:
        """Entries whose gradients are partial sums over tp, and those that are to be averaged.

        An FP8 reduction casts a block's gradients in runs of neighbouring values. Where such a run
        also holds values of a split weight, its scale is another one on each tp rank: what all of
        them hold whole, and nothing else joins, would drift apart without an average.
        """
        layout = self.mesh.layout
        cast = layout.fsdp > 1 and bool(self.model.fp8_reductions)
        partial, averaged = [], []
        for entry in sorted(self.entries, key=lambda entry: entry.name):
            if entry.spec.partial_over_tp(layout.sequence_parallel):
                partial.append(entry)
            elif cast and entry.spec.layer is not None and entry.spec.tp_dim is None:
                averaged.append(entry)
        return partial, averaged

    def _sum_tied(self) -> None:
        """A parameter and its copy get the sum of both gradients, hence stay equal."""
        for name, spec in self.model.copies.items():
            first, last = self._by_name.get(spec.copy_of or ""), self._by_name.get(name)
            if first is not None and last is not None:
                total = self._grad(first).add_(self._grad(last))
                self._grad(last).copy_(total)
            elif first is not None or last is not None:
                mine = first or last
                assert mine is not None
                self.mesh.tied.all_reduce(self._grad(mine), "tied_embedding")

    @staticmethod
    def _grad(entry: _Entry) -> Tensor:
        assert entry.shard.grad is not None
        return entry.shard.grad

    def norm(self, more: Tensor | float = 0.0) -> Tensor:
        """Global 2-norm of the raw gradients, fp64 scalar, one value on all ranks of the world.

        The same bits at every pipeline layout. Not finite if any gradient on any rank is not: also
        one of a copy that does not count, whose NaN would go into that copy alone and never show in
        what is saved.

        Args:
            more: added to this rank's sum of squares; inf makes the norm inf everywhere.
        """
        return self._global_norm([self._grad(entry) for entry in self._filled], more)

    def parameter_norm(self) -> Tensor:
        """Global 2-norm of the fp32 master weights; otherwise as `norm`."""
        return self._global_norm([entry.shard for entry in self._filled])

    @torch.no_grad()
    def _global_norm(self, shards: list[Tensor], more: Tensor | float = 0.0) -> Tensor:
        """2-norm over all ranks of `shards`, one for each entry of `_filled`; waits for nothing.

        Each parameter's square has a place of its own in one fp64 vector of the whole model, and
        `more` the last: ranks that do not hold a parameter add an exact zero there, and the sum
        over parameters has one order, however they are spread over stages. A parameter's own shards
        are added by the all-reduce.
        """
        squares = torch.zeros(
            self._num_places + 1, dtype=torch.float64, device=self.mesh.world.device
        )
        if shards:
            norms = torch._foreach_norm(shards, 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
            # Copies that do not count add 0, or NaN where they are not finite.
            squares[self._places] = torch.stack(norms).square() * self._weights
        squares[-1] = more
        self.mesh.all.all_reduce(squares, "grad_norm")
        return squares.sum().sqrt()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all gradients by `factor`."""
        grads = [self._grad(e) for e in self.entries]
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def zeros(self) -> int:
        """Global number of exact zeros among the gradients, each parameter counted once."""
        count = torch.zeros((), dtype=torch.int64, device=self.mesh.world.device)
        for entry in self.entries:
            if entry.counts:
                count += (self._grad(entry) == 0).sum()
        self.mesh.all.all_reduce(count, "grad_norm")
        return int(count)

    def nonfinite_names(self) -> list[str]:
        """This rank's parameters whose gradient holds an inf or NaN; syncs, for reports only."""
        return [e.name for e in self.entries if not bool(self._grad(e).isfinite().all())]
