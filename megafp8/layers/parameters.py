"""Creates parameters as DTensors on the tp axis, with initial values that no layout changes.

A value depends on (seed, canonical name, global row) alone: rows are drawn in blocks of BLOCK_ROWS,
each from a CPU generator of its own, and a rank draws only the blocks that hold its rows.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from megafp8.config import ParameterSpec
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.rng import stream_seed

BLOCK_ROWS = 128


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, with its gradient flowing back to it."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def gradient_like(mine: Tensor, weight: DTensor) -> DTensor:
    """This rank's gradient [n, k] as a DTensor placed like the weight (maybe [2, n/2, k])."""
    return DTensor.from_local(
        mine.view(weight.to_local().shape),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def accumulate_gradient(weight: DTensor, mine: Tensor) -> None:
    """Add this rank's gradient [n, k] to `weight.grad`, outside of autograd.

    fp32, since several W slots may add up before FSDP2 takes the gradient over.
    """
    if weight.grad_dtype != torch.float32:
        weight.grad_dtype = torch.float32
    if weight.grad is None:
        weight.grad = gradient_like(mine, weight).float()
    else:
        local(weight.grad).add_(mine.view(local(weight.grad).shape))


def _draw_rows(seed: int, name: str, first: int, last: int, columns: int, std: float) -> Tensor:
    """Rows [first, last) of the parameter seen as [rows, columns], fp32 on CPU."""
    parts = []
    for block in range(first // BLOCK_ROWS, math.ceil(last / BLOCK_ROWS)):
        generator = torch.Generator().manual_seed(stream_seed(seed, name, block))
        values = torch.empty(BLOCK_ROWS, columns).normal_(0.0, std, generator=generator)
        start = block * BLOCK_ROWS
        parts.append(values[max(first - start, 0) : min(last - start, BLOCK_ROWS)])
    return torch.cat(parts) if parts else torch.empty(0, columns)


class ParameterFactory:
    """Makes the named parameter of a model.

    Args:
        specs: every parameter of the model (`ModelShape.parameters()`).
        mesh: gives the tp axis and the device.
        seed: run seed.
        std: standard deviation of normal initial values (Megatron's --init-method-std).
        num_layers: divides std by sqrt(2 * num_layers) in projections back to the residual stream.
        vocab_size: rows from here up in vocabulary tables are padding and start at 0.
    """

    def __init__(
        self,
        specs: Iterable[ParameterSpec],
        mesh: Mesh,
        seed: int,
        std: float,
        num_layers: int,
        vocab_size: int,
    ) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.mesh, self.seed, self.std = mesh, seed, std
        self.num_layers, self.vocab_size = num_layers, vocab_size

    def __call__(self, name: str) -> nn.Parameter:
        """The fp32 parameter `name`: a DTensor, this rank's tp shard of the global shape."""
        spec = self.specs[name]
        local = self._local_values(spec)
        placement = Replicate() if spec.tp_dim is None else Shard(spec.tp_dim)
        return nn.Parameter(
            DTensor.from_local(
                local.to(self.mesh.world.device),
                self.mesh.tp_mesh,
                [placement],
                run_check=False,
                shape=torch.Size(spec.shape),
                stride=torch.empty(spec.shape, device="meta").stride(),
            )
        )

    def _local_values(self, spec: ParameterSpec) -> Tensor:
        shape, rank = spec.local_shape(self.mesh.tp.size), self.mesh.tp.rank
        if spec.kind == "norm":
            return torch.ones(shape)
        if spec.kind in ("bias", "norm_bias"):
            return torch.zeros(shape)
        std = self.std
        if spec.name.endswith(("linear_proj.weight", "linear_fc2.weight")):
            std /= math.sqrt(2 * self.num_layers)
        rows, columns = spec.shape[-2], spec.shape[-1]
        pieces = []
        for outer in range(math.prod(spec.shape[:-2])):  # gate and up of a fused fc1; else once
            if spec.tp_dim == len(spec.shape) - 1:
                width = shape[-1]
                full = _draw_rows(
                    self.seed, spec.name, outer * rows, (outer + 1) * rows, columns, std
                )
                pieces.append(full[:, rank * width : (rank + 1) * width].contiguous())
            else:
                first = outer * rows + (rank * shape[-2] if spec.tp_dim is not None else 0)
                pieces.append(
                    _draw_rows(self.seed, spec.name, first, first + shape[-2], columns, std)
                )
        values = torch.cat(pieces).view(shape)
        if spec.kind in ("embedding", "output"):
            first = rank * shape[0]
            values[max(self.vocab_size - first, 0) :] = 0.0
        return values
