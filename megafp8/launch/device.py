"""Looks at this rank's device and decides `auto` for it, before anything is built."""

from megafp8.config.auto_precision import Hardware, PrecisionChoice, asks_for_auto, for_hardware
from megafp8.config.run_config import RunConfig


def detect(config: RunConfig, local_rank: int) -> Hardware:
    """Describe the device that this rank will run on.

    Raises:
        LaunchError: a backend is asked for that is not there, or the rank has no GPU.
    """
    # Imported here: torch takes seconds, and most command lines need no look at the device.
    import torch

    from megafp8.errors import LaunchError
    from megafp8.parallel.startup import choose_backend

    if choose_backend(config.parallel.distributed_backend) != "nccl":
        return Hardware("cpu", "cpu")
    if local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
            "start as many processes per node as it has GPUs"
        )
    name = torch.cuda.get_device_name(local_rank)
    if torch.version.hip is not None:
        return Hardware("rocm", name)
    return Hardware("cuda", name, torch.cuda.get_device_capability(local_rank))


def decide(config: RunConfig, local_rank: int) -> tuple[RunConfig, PrecisionChoice | None]:
    """Return the configuration without `auto`, and what was decided (None: nothing).

    Raises:
        MegaFP8Error: see `detect` and `for_hardware`.
    """
    if not asks_for_auto(config):
        return config, None
    return for_hardware(config, detect(config, local_rank))
