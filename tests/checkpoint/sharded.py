"""A small set of tensors as FSDP2 over DTensor-on-tp makes them, at any layout.

Values depend on the name alone, so that any layout can be compared with the global tensor.
"""

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megafp8.checkpoint import CheckpointRecord, load_tensors, save_checkpoint

H = 8

# Name: (shape, tp dim or None, fsdp dim). Row counts are chosen so that shards are uneven (10 rows
# over tp 2 and fsdp 2: 3, 2, 3, 2) and empty (2 rows over tp 2 and fsdp 2, or over fsdp 4).
PARAMETERS: dict[str, tuple[tuple[int, ...], int | None, int]] = {
    "embedding.weight": ((12, H), 0, 0),
    "qkv.weight": ((10, H), 0, 0),
    "tiny.weight": ((2, 3), 0, 0),
    "proj.weight": ((H, 12), 1, 0),
    "proj.bias": ((H,), None, 0),
    "fc1.weight": ((2, 12, H), 1, 2),
    "norm.weight": ((2,), None, 0),
    "small.weight": ((4, 3), None, 0),
}


def reference(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the global tensor of a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


class Holder(nn.Module):
    """Parameters on tp, ready for `fully_shard`."""

    def __init__(self, mesh: Any, names: list[str], blank: bool) -> None:
        super().__init__()
        self.keys = {name.replace(".", "_"): name for name in names}
        for key, name in self.keys.items():
            shape, tp_dim, _ = PARAMETERS[name]
            full = torch.full(shape, torch.nan) if blank else reference(name, shape)
            placement = Replicate() if tp_dim is None else Shard(tp_dim)
            self.register_parameter(key, nn.Parameter(distribute_tensor(full, mesh, [placement])))


def build(
    tp: int, fsdp: int, replicate: int = 1, names: list[str] | None = None, *, blank: bool = False
) -> dict[str, Tensor]:
    """Return weights, fp32 moments and plain tensors on this world.

    Args:
        tp: Tensor-parallel size.
        fsdp: Ranks that shard.
        replicate: Ranks that hold equal shards (HSDP).
        names: Parameters to build; all if not given.
        blank: NaN (and -1) instead of values, for a load to fill.
    """
    mesh = init_device_mesh(
        "cpu", (replicate, fsdp, tp), mesh_dim_names=("replicate", "fsdp", "tp")
    )
    data_mesh = mesh["fsdp"] if replicate == 1 else mesh["replicate", "fsdp"]
    holder = Holder(mesh["tp"], names or list(PARAMETERS), blank)
    dims = {
        parameter: PARAMETERS[holder.keys[key]][2] for key, parameter in holder.named_parameters()
    }
    fully_shard(holder, mesh=data_mesh, shard_placement_fn=lambda p: Shard(dims[p]))
    tensors: dict[str, Tensor] = {}
    for key, parameter in holder.named_parameters():
        name = holder.keys[key]
        tensors[name] = parameter
        moment = parameter.detach().clone()
        moment.to_local().mul_(2.0)
        tensors[f"optimizer.exp_avg.{name}"] = moment
    tensors.update(plain(blank=blank))
    return tensors


def plain(*, blank: bool = False) -> dict[str, Tensor]:
    """Return the tensors that every rank holds whole."""
    values = {
        "optimizer.step": torch.tensor(17),
        "fp8.qkv.weight.scale": torch.tensor(448.0),
        "fp8.qkv.weight.amax_history": reference("amax", (5,)),
        "rng.cpu": torch.arange(16, dtype=torch.uint8),
        "moment_bf16": reference("moment", (3, 2), torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        # bfloat16 rounds 1 + 2^-10 to 1.
        "master": torch.tensor([1.0009765625]),
    }
    if blank:
        return {name: torch.zeros_like(value) for name, value in values.items()}
    return values


def expected(name: str) -> Tensor:
    """Return the global value of any name of `build`."""
    if name in plain():
        return plain()[name]
    stem = name.removeprefix("optimizer.exp_avg.")
    value = reference(stem, PARAMETERS[stem][0])
    return value if stem == name else value * 2.0


def differing(tensors: dict[str, Tensor]) -> list[str]:
    """Return the names whose global value is not, bit for bit, the expected one (collective)."""
    wrong = []
    for name, tensor in tensors.items():
        value = tensor.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        want = expected(name)
        if value.dtype != want.dtype or not torch.equal(value, want):
            wrong.append(name)
    return wrong


def record(iteration: int) -> CheckpointRecord:
    return CheckpointRecord(
        iteration=iteration,
        config={"model": {"hidden_size": H}},
        data_position={"consumed_samples": 8 * iteration},
    )


def save_layout(
    root: str, tp: int, fsdp: int, replicate: int = 1, iteration: int = 10, **kwargs: Any
) -> str:
    """Build a layout and save it; a function for ranks."""
    tensors = build(tp, fsdp, replicate)
    return str(save_checkpoint(Path(root), iteration, tensors, record(iteration), **kwargs))


def load_layout(directory: str, tp: int, fsdp: int, replicate: int = 1) -> list[str]:
    """Load into a blank layout in place, return the names that differ; a function for ranks."""
    tensors = build(tp, fsdp, replicate, blank=True)
    local = {
        name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()
        for name, tensor in tensors.items()
    }
    assert load_tensors(Path(directory), tensors) == []
    for name, tensor in tensors.items():
        now = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        assert now.data_ptr() == local[name], f"{name} was replaced instead of filled"
    return differing(tensors)


def local_shapes(tp: int, fsdp: int) -> dict[str, tuple[int, ...]]:
    """Return the shard shapes of a layout; a function for ranks."""
    return {
        name: tuple(tensor.to_local().shape)
        for name, tensor in build(tp, fsdp).items()
        if isinstance(tensor, DTensor)
    }
