"""What the launcher's variables mean, and which are refused."""

import pytest

from megafp8.config.environment import (
    LaunchEnvironment,
    OwnRankError,
    guess_ranks,
    read_world_size,
)
from megafp8.errors import LaunchError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def test_alone_and_under_torchrun() -> None:
    assert LaunchEnvironment.from_mapping({}) == LaunchEnvironment(0, 1, 0, ())
    assert LaunchEnvironment.from_mapping(TORCHRUN) == LaunchEnvironment(1, 2, 1, ())
    without_local = {"RANK": "1", "WORLD_SIZE": "2"}
    assert LaunchEnvironment.from_mapping(without_local).local_rank == 1


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE: found 'abc'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: found ''"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE: found 0"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE: found '-2'"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE: found '2.0'"),
        ({"RANK": "x"}, "RANK: found 'x'"),
        ({"RANK": "2"}, "RANK: found 2, allowed 0 to WORLD_SIZE - 1 = 1"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK: found '-1'"),
        ({"RANK": None}, "RANK is missing"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is missing"),
        ({"RANK": None, "WORLD_SIZE": None}, "RANK is missing"),
    ],
)
def test_broken_environments(changes: dict[str, str | None], fragment: str) -> None:
    merged = {**TORCHRUN, **changes}
    environment = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(LaunchError) as caught:
        LaunchEnvironment.from_mapping(environment)
    assert fragment in str(caught.value) and caught.value.exit_code == 2


def test_a_rank_that_is_wrong_itself_is_marked() -> None:
    for name in ("RANK", "LOCAL_RANK"):
        with pytest.raises(OwnRankError):
            LaunchEnvironment.from_mapping({**TORCHRUN, name: "x"})


def test_torchrun_wins_over_slurm_and_says_so() -> None:
    launch = LaunchEnvironment.from_mapping({**TORCHRUN, "SLURM_NTASKS": "8"})
    assert launch.world_size == 2
    assert launch.notes == ("WORLD_SIZE=2 from the launcher is used; SLURM_NTASKS=8 is ignored",)
    assert LaunchEnvironment.from_mapping({**TORCHRUN, "SLURM_NTASKS": "2"}).notes == ()
    alone = LaunchEnvironment.from_mapping({"SLURM_NTASKS": "8"})
    assert alone.world_size == 1 and "SLURM_NTASKS=8" in alone.notes[0]


def test_srun_without_torchrun_is_refused() -> None:
    with pytest.raises(LaunchError, match="srun started 8 tasks"):
        LaunchEnvironment.from_mapping({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"})


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun started 2 processes"),
        ({"MV2_COMM_WORLD_SIZE": "4"}, "mpirun started 4 processes"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpiexec started 2 processes"),
        ({"PMI_SIZE": "2", "PALS_RANKID": "0"}, "mpiexec started 2 processes"),
        ({"JSM_NAMESPACE_SIZE": "6"}, "jsrun started 6 processes"),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, "flux run started 2 processes"),
        # These tell which process this is and not how many there are.
        ({"PMIX_RANK": "1"}, "mpirun started several processes"),
        ({"PALS_RANKID": "3"}, "mpiexec started several processes"),
        ({"ALPS_APP_PE": "1"}, "aprun started several processes"),
    ],
)
def test_processes_of_mpi_launchers_are_refused(variables: dict[str, str], launcher: str) -> None:
    with pytest.raises(LaunchError) as caught:
        LaunchEnvironment.from_mapping(variables)
    text, (name, value) = str(caught.value), next(iter(variables.items()))
    assert launcher in text and f"({name}={value})" in text and "start torchrun" in text
    assert caught.value.exit_code == 2
    # torchrun below them sets its own, and is believed.
    assert LaunchEnvironment.from_mapping({**TORCHRUN, **variables}).world_size == 2


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"MV2_COMM_WORLD_SIZE": "1"},
        {"JSM_NAMESPACE_SIZE": "1", "JSM_NAMESPACE_RANK": "0"},
        {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"},
        {"PMIX_RANK": "0"},
        {"PMI_SIZE": "", "PMI_RANK": "x"},
    ],
)
def test_one_process_of_an_mpi_launcher_trains(variables: dict[str, str]) -> None:
    assert LaunchEnvironment.from_mapping(variables) == LaunchEnvironment(0, 1, 0, ())


def test_who_speaks_before_all_is_validated() -> None:
    assert guess_ranks({}) == (0, 0)
    assert guess_ranks({"RANK": "3"}) == (3, 3)
    assert guess_ranks({"RANK": "3", "LOCAL_RANK": "0"}) == (3, 0)
    assert guess_ranks({"RANK": "x"}) == (0, 0)
    assert read_world_size({}) is None and read_world_size({"WORLD_SIZE": "4"}) == 4
