"""Joins and leaves the process group; below the launcher, only this file reads the environment."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megafp8.errors import LaunchError
from megafp8.parallel.rendezvous import Rendezvous
from megafp8.parallel.watch import Watch

MEETING_LIMIT = timedelta(minutes=20)  # for ranks that show that they live


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


def watch_over(rank: int, world_size: int, asked: Callable[[], int] = lambda: 0) -> Watch:
    """Return what leaves this rank's signs of life at the rendezvous, and reads those of others.

    More than one process needs MASTER_ADDR and MASTER_PORT in the environment (torchrun sets them).

    Args:
        rank: this rank.
        world_size: ranks in all.
        asked: the signal that is about to end this process before its first iteration; 0 if none.

    Raises:
        LaunchError: a variable is missing, or no port.
    """
    if world_size == 1:
        return Watch(rank, world_size)
    missing = [key for key in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(key)]
    if missing:
        raise LaunchError(
            f"world size {world_size} needs {' and '.join(missing)} in the environment; "
            "start with torchrun, which sets them"
        )
    port = os.environ["MASTER_PORT"]
    if not (port.isdecimal() and 1 <= int(port) < 2**16):
        raise LaunchError(f"MASTER_PORT: found {port!r} in the environment, allowed 1 to 65535")
    rendezvous = Rendezvous(
        os.environ["MASTER_ADDR"],
        int(port),
        rank,
        world_size,
        held=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )
    return Watch(rank, world_size, rendezvous=rendezvous, asked=asked)


def start(
    rank: int,
    world_size: int,
    local_rank: int,
    backend: str | None = None,
    timeout_minutes: float = 10,
    deterministic: bool = False,
    watch: Watch | None = None,
) -> World:
    """Initialise the default process group and choose this rank's device.

    More than one process meet first, at the store of `watch` (one of their own by default); a
    single process uses an in-memory store and opens no port.

    Raises:
        LaunchError: NCCL asked for without CUDA, more local ranks than GPUs, or no rendezvous.
        PeerError: another rank has failed before it came.
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
            # In memory: a single process needs no port, and two of them on a host do not collide.
            store=dist.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=0,
            world_size=1,
            timeout=timeout,
        )
    else:
        watch = watch or watch_over(rank, world_size)
        store = watch.meet(timeout, max(timeout, MEETING_LIMIT))
        store.set_timeout(timeout)  # the limit of the watch's own connection stays short
        # Told by others when this rank hangs there, which torch does in silence.
        watch.place = "the creation of the process group"
        dist.init_process_group(
            name,
            store=dist.PrefixStore("default_pg", store),  # pyright: ignore[reportPrivateImportUsage]
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # NCCL then makes its communicator at once, and not inside the first step.
            device_id=device if name == "nccl" else None,
        )
    return World(rank, world_size, local_rank, device, name, timeout)


def stop() -> None:
    """Leave the process group. The barrier keeps gloo from aborting while a peer still sends."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
