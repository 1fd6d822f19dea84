"""World detection: each launcher's variables, as those launchers really set them."""

import pytest

from hora.core.errors import WorldError
from hora.core.world import World, from_environment

HORA = {
    "HORA_RANK": "5",
    "HORA_SIZE": "6",
    "HORA_LOCAL_RANK": "2",
    "HORA_LOCAL_SIZE": "3",
    "HORA_HOST_INDEX": "1",
    "HORA_HOST_COUNT": "2",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def place(world: World) -> tuple[int, ...]:
    return (world.rank, world.size, world.local_rank, world.local_size, world.host_index, world.host_count)


@pytest.mark.parametrize(
    ("environ", "expected", "source"),
    [
        ({}, (0, 1, 0, 1, 0, 1), "none"),
        (HORA, (5, 6, 2, 3, 1, 2), "hora"),
        (TORCHRUN, (3, 4, 1, 2, 1, 2), "torchrun"),
        (OPEN_MPI, (1, 2, 1, 2, 0, 1), "Open MPI"),
        (MPICH, (0, 4, 0, 2, -1, -1), "MPICH"),
        (SRUN, (3, 5, 1, 2, 1, 3), "Slurm"),
        # `srun --mpi=pmix`: PMIx knows the rank, Slurm the rest.
        (SRUN | {"PMIX_RANK": "3"}, (3, 5, 1, 2, 1, 3), "Slurm"),
        # `srun --mpi=pmi2` leaves the PMI rank and size without the local ones.
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "5"}, (3, 5, 1, 2, 1, 3), "Slurm"),
        # The innermost launcher wins.
        (SRUN | TORCHRUN, (3, 4, 1, 2, 1, 2), "torchrun"),
        (SRUN | OPEN_MPI, (1, 2, 1, 2, 0, 1), "Open MPI"),
        # `hora run` sets torchrun's names too, for scripts that use torch.distributed alone.
        (HORA | {"RANK": "5", "WORLD_SIZE": "6"}, (5, 6, 2, 3, 1, 2), "hora"),
        # A batch script's own shell is one worker, whatever the allocation.
        ({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0, 1, 0, 1), "none"),
        # Job templates leave WORLD_SIZE behind; alone it says nothing about this worker.
        ({"WORLD_SIZE": "8"}, (0, 1, 0, 1, 0, 1), "none"),
    ],
)
def test_each_launcher(environ: dict[str, str], expected: tuple[int, ...], source: str) -> None:
    world = from_environment(environ)
    assert place(world) == expected
    assert world.source == source


@pytest.mark.parametrize("complete", [HORA, OPEN_MPI, MPICH], ids=["hora", "open-mpi", "mpich"])
def test_a_missing_variable_is_named(complete: dict[str, str]) -> None:
    for name in complete:
        if name in ("OMPI_COMM_WORLD_NODE_RANK", "OMPI_UNIVERSE_SIZE", "PMI_FD") or name.startswith("PMIX"):
            continue
        with pytest.raises(WorldError, match=f"{name} is missing"):
            from_environment({key: value for key, value in complete.items() if key != name})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_partial_torchrun_variables_are_named(name: str) -> None:
    with pytest.raises(WorldError, match=f"{name} is missing"):
        from_environment({key: value for key, value in TORCHRUN.items() if key != name})


def test_partial_slurm_variables_are_named() -> None:
    for name in ("SLURM_NODEID", "SLURM_LOCALID"):
        with pytest.raises(WorldError, match=f"{name} is missing"):
            from_environment({key: value for key, value in SRUN.items() if key != name})
    with pytest.raises(WorldError, match="SLURM_TASKS_PER_NODE is missing"):
        from_environment({key: value for key, value in SRUN.items() if key != "SLURM_STEP_TASKS_PER_NODE"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (HORA | {"HORA_RANK": "6"}, r"rank 6 is out of range \(0 to 5\).*HORA_RANK=6"),
        (HORA | {"HORA_RANK": "-1"}, "rank -1 is out of range"),
        (HORA | {"HORA_SIZE": "two"}, "HORA_SIZE='two' is not a whole number"),
        (HORA | {"HORA_SIZE": ""}, "HORA_SIZE='' is not a whole number"),
        (HORA | {"HORA_LOCAL_RANK": "3"}, r"local rank 3 is out of range \(0 to 2\)"),
        (HORA | {"HORA_HOST_INDEX": "2"}, "host index 2 is out of range"),
        (HORA | {"RANK": "0"}, "HORA_RANK=5 and RANK=0 contradict each other"),
        (HORA | {"WORLD_SIZE": "2", "RANK": "5"}, "HORA_SIZE=6 and WORLD_SIZE=2 contradict"),
        (HORA | OPEN_MPI, "HORA_RANK=5 and OMPI_COMM_WORLD_RANK=1 contradict"),
        (HORA | {"PMI_RANK": "5", "PMI_SIZE": "7"}, "HORA_SIZE=6 and PMI_SIZE=7 contradict"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "local size 5 is out of range"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 is set, but PMIx has no variable for the number"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, "describes 3 hosts with 6 workers"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, "is not of Slurm's form"),
    ],
)
def test_contradictions_are_errors_that_name_the_variables(environ: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        from_environment(environ)


def test_slurm_layout_is_run_length_coded() -> None:
    last = SRUN | {"SLURM_PROCID": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    assert place(from_environment(last)) == (4, 5, 0, 1, 2, 3)
