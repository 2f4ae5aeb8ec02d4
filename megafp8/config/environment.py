"""What the launcher's environment says about this process, read from a mapping."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from megafp8.errors import LaunchError

_COUNT = re.compile(r"[0-9]{1,9}")

# What other launchers tell each of their processes: how many there are, or which it is alone.
_SIZES = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",  # Open MPI
    "MV2_COMM_WORLD_SIZE": "mpirun",  # MVAPICH2
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
    "PALS_SIZE": "mpiexec",  # HPE Cray
    "PMI_SIZE": "mpiexec",  # MPICH, Intel MPI, and others that speak PMI
}
_RANKS = {"PALS_RANKID": "mpiexec", "PMIX_RANK": "mpirun", "ALPS_APP_PE": "aprun"}


class OwnRankError(LaunchError):
    """An environment that is wrong on this rank; the others may know nothing of it."""


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process among those that were started.

    Attributes:
        rank: world rank.
        world_size: processes in all.
        local_rank: rank on this node.
        notes: decisions worth a log line.
        started: when the program did, by `time.monotonic()`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    notes: tuple[str, ...] = ()
    started: float = field(default_factory=time.monotonic, compare=False, repr=False)

    @classmethod
    def from_mapping(cls, environment: Mapping[str, str]) -> LaunchEnvironment:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; torchrun sets all three.

        Raises:
            LaunchError: A variable is missing, not a number or out of range, or srun, mpirun or
                another launcher of theirs started several processes without a rendezvous.
        """
        present = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environment]
        if not present:
            _refuse_processes_apart(environment)
            return cls(notes=_slurm_alone(environment))
        for name in ("RANK", "WORLD_SIZE"):
            if name not in environment:
                raise LaunchError(
                    f"{name} is missing from the environment, which has {' and '.join(present)}; "
                    "start with torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK"
                )
        world_size, rank = read_world_size(environment), _count(environment, "RANK")
        assert world_size is not None
        if rank >= world_size:
            raise OwnRankError(
                f"RANK: found {rank}, allowed 0 to WORLD_SIZE - 1 = {world_size - 1}"
            )
        local_rank = _count(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else rank
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            notes=_slurm_beside(environment, world_size),
        )


def read_world_size(environment: Mapping[str, str]) -> int | None:
    """Return WORLD_SIZE, or None where it is not set.

    Raises:
        LaunchError: It is not a positive integer.
    """
    if "WORLD_SIZE" not in environment:
        return None
    size = _count(environment, "WORLD_SIZE")
    if size < 1:
        raise LaunchError(f"WORLD_SIZE: found {size}, allowed a positive integer")
    return size


def guess_ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return RANK and LOCAL_RANK where they can be read.

    Decides who prints before anything is validated; an unreadable rank counts as 0 and speaks.
    """
    text = environment.get("RANK", "0")
    rank = int(text) if _COUNT.fullmatch(text) else 0
    local = environment.get("LOCAL_RANK", text)
    return rank, int(local) if _COUNT.fullmatch(local) else 0


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not _COUNT.fullmatch(text):
        kind = LaunchError if name == "WORLD_SIZE" else OwnRankError
        raise kind(f"{name}: found {text!r} in the environment, allowed an integer >= 0")
    return int(text)


def _refuse_processes_apart(environment: Mapping[str, str]) -> None:
    """Refuse one of several processes that know nothing of each other.

    Each would train alone and write into the same run folder.
    """
    for variables, most in ((_SIZES, 1), (_RANKS, 0)):
        for name, launcher in variables.items():
            value = environment.get(name, "")
            if not _COUNT.fullmatch(value) or int(value) <= most:
                continue
            srun = launcher == "srun"
            count = f"{value} {'tasks' if srun else 'processes'}" if most else "several processes"
            start = "srun --ntasks-per-node 1 torchrun ..." if srun else "torchrun ..."
            raise LaunchError(
                f"{launcher} started {count} ({name}={value}) but WORLD_SIZE and RANK are not set; "
                f"start torchrun once per node, which starts the ranks there: {start}"
            )


def _slurm_alone(environment: Mapping[str, str]) -> tuple[str, ...]:
    allocated = environment.get("SLURM_NTASKS", "1")
    if allocated in ("", "1"):
        return ()
    return (f"SLURM_NTASKS={allocated} is ignored: without torchrun this is one process",)


def _slurm_beside(environment: Mapping[str, str], world_size: int) -> tuple[str, ...]:
    tasks = environment.get("SLURM_NTASKS", "")
    if tasks in ("", str(world_size)):
        return ()
    return (f"WORLD_SIZE={world_size} from the launcher is used; SLURM_NTASKS={tasks} is ignored",)
