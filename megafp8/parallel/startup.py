"""Joins and leaves the process group; below the launcher, only this file reads the environment."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megafp8.errors import LaunchError

MEETING_LIMIT = timedelta(minutes=20)


@dataclass(frozen=True)
class World:
    """This process among all.

    Attributes:
        rank: global rank, 0 <= rank < size.
        size: number of processes.
        local_rank: rank on this node.
        device: where this rank's tensors live.
        backend: "nccl" or "gloo".
        timeout: of every collective, None for torch's default.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    timeout: timedelta | None = None


def choose_backend(requested: str | None) -> str:
    """NCCL where CUDA is, else gloo; a request that cannot be met is an error with the reason."""
    available = torch.cuda.is_available()
    if requested == "nccl" and not available:
        raise LaunchError(
            "--distributed-backend: found nccl, but torch sees no CUDA device here; allowed: gloo"
        )
    return requested or ("nccl" if available else "gloo")


def start(
    rank: int,
    world_size: int,
    local_rank: int,
    backend: str | None = None,
    timeout_minutes: float = 10,
    deterministic: bool = False,
) -> World:
    """Initialise the default process group and choose this rank's device.

    More than one process needs MASTER_ADDR and MASTER_PORT in the environment (torchrun sets them);
    a single process uses an in-memory store and opens no port.

    Raises:
        LaunchError: NCCL asked for without CUDA, more local ranks than GPUs, or no rendezvous.
    """
    name = choose_backend(backend)
    device = torch.device("cpu")
    if name == "nccl":
        if local_rank >= torch.cuda.device_count():
            raise LaunchError(
                f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
                "start as many processes per node as it has GPUs"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if deterministic:
        # cuBLAS reads this when its first handle is made, which is later than this line.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    timeout = timedelta(minutes=timeout_minutes)
    if world_size == 1:
        dist.init_process_group(
            name,
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=0,
            world_size=1,
            timeout=timeout,
        )
    else:
        missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
        if missing:
            raise LaunchError(
                f"world size {world_size} needs {' and '.join(missing)} in the environment; "
                "start with torchrun, which sets them"
            )
        dist.init_process_group(
            name,
            store=_meet(rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if name == "nccl" else None,
        )
    return World(rank, world_size, local_rank, device, name, timeout)


def _meet(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Wait until every rank has come to the rendezvous, and return its store.

    A rank may come late for a good reason, such as an index that it alone has to build: this wait
    has a limit of its own, since that of collectives may be short.

    Raises:
        LaunchError: ranks are missing; names them where a launcher holds the store.
    """
    limit = max(timeout, MEETING_LIMIT)
    try:
        store, _, _ = next(rendezvous("env://", rank=rank, world_size=world_size, timeout=limit))
    except RuntimeError as error:
        # Without a launcher's store rank 0 holds it, and opens it only when all have come.
        found = " ".join(str(error).split())[:200]
        raise LaunchError(
            f"the {world_size} ranks did not meet at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {limit.total_seconds():g} s ({found}); look at "
            "what the missing ones printed"
        ) from error
    keys = [f"megafp8_joined_{other}" for other in range(world_size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, limit)
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise LaunchError(
            f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {world_size} "
            f"did not join within {limit.total_seconds():g} s; look at what they printed"
        ) from error
    return dist.PrefixStore("default_pg", store)  # pyright: ignore[reportPrivateImportUsage]


def stop() -> None:
    """Leave the process group. The barrier keeps gloo from aborting while a peer still sends."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
