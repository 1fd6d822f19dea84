"""Who am I: this worker's place among all workers, read from what the launcher left behind.

Launchers nest (``mpirun`` inside an ``sbatch`` script, ``torchrun`` started by ``srun``), so the
innermost one wins: Hora, then torchrun, Open MPI, MPICH/PMI, PMIx, Slurm. Without any of them there is
one worker. Partial or contradictory variables are an error, because guessing a rank wrongly shows up
as a hang or as two ranks that read the same data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hora.core.errors import WorldError

__all__ = ["World", "from_environment"]

Environ = Mapping[str, str]

_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True, kw_only=True)
class World:
    """This worker's place in the job.

    Attributes:
        rank: 0 to ``size - 1``, unique in the job.
        size: number of workers in the job.
        local_rank: 0 to ``local_size - 1``, unique on its host.
        local_size: number of workers on this host.
        host_index: 0 to ``host_count - 1``; -1 when the launcher does not say (MPI does not), in which
            case the ranks agree on it when they meet.
        host_count: number of hosts; -1 like ``host_index``.
        source: the launcher whose variables were read, for messages.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host_index: int = 0
    host_count: int = 1
    source: str = "none"

    def __post_init__(self) -> None:
        for low, value, high, name in (
            (1, self.size, None, "size"),
            (0, self.rank, self.size, "rank"),
            (1, self.local_size, self.size + 1, "local size"),
            (0, self.local_rank, self.local_size, "local rank"),
            (-1, self.host_index, self.host_count if self.host_count > 0 else 0, "host index"),
        ):
            if value < low or (high is not None and value >= high):
                limit = f"at least {low}" if high is None else f"{low} to {high - 1}"
                raise WorldError(
                    f"{name} {value} is out of range ({limit}) in the world of {self.source}: {self!r}.",
                    fix="Start the workers with `hora run -n N script.py`, or correct the variables.",
                )


def from_environment(environ: Environ | None = None) -> World:
    """The world that the launcher described in environment variables; one worker if there is none.

    Raises:
        WorldError: variables of a launcher are missing, malformed, out of range, or contradict those
            of another launcher that cannot be nested with it.
    """
    environ = os.environ if environ is None else environ
    for read in _READERS:
        world = read(environ)
        if world is not None:
            return world
    return World()


def _hora(environ: Environ) -> World | None:
    names = (
        "HORA_RANK",
        "HORA_SIZE",
        "HORA_LOCAL_RANK",
        "HORA_LOCAL_SIZE",
        "HORA_HOST_INDEX",
        "HORA_HOST_COUNT",
    )
    values = _all_or_none(environ, names, source="hora")
    if values is None:
        return None
    # `hora run` sets torchrun's variables too, for scripts that use torch.distributed alone. A
    # difference means that a second launcher ran inside the first. Slurm's are not compared: each task of
    # an `srun` may well start a job of its own.
    for theirs in (("RANK", "WORLD_SIZE"), _OPEN_MPI[:2], _MPICH[:2]):
        for ours, other in zip(("HORA_RANK", "HORA_SIZE"), theirs, strict=True):
            if other in environ and environ[other] != environ[ours]:
                raise WorldError(
                    f"{ours}={environ[ours]} and {other}={environ[other]} contradict each other: "
                    "two launchers, one inside the other?",
                    fix="Start the script with one of `hora run`, `torchrun` and `mpirun`, not with two.",
                )
    rank, size, local_rank, local_size, host_index, host_count = values
    return _world(
        "hora",
        names,
        environ,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_index=host_index,
        host_count=host_count,
    )


def _torchrun(environ: Environ) -> World | None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # WORLD_SIZE alone is left behind by several job templates and says nothing about this process.
    if not any(name in environ for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        return None
    values = _all_or_none(environ, names, source="torchrun")
    assert values is not None
    rank, size, local_rank, local_size = values
    host_index, host_count = _hosts(
        environ, "GROUP_RANK", "GROUP_WORLD_SIZE", size=size, local_size=local_size
    )
    return _world(
        "torchrun",
        (*names, "GROUP_RANK", "GROUP_WORLD_SIZE"),
        environ,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_index=host_index,
        host_count=host_count,
    )


def _open_mpi(environ: Environ) -> World | None:
    return _mpi(environ, "Open MPI", _OPEN_MPI)


def _mpich(environ: Environ) -> World | None:
    if "SLURM_STEP_ID" in environ and not any(name in environ for name in _MPICH[2:]):
        # `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE without the local ones; Slurm's own say all.
        return None
    return _mpi(environ, "MPICH", _MPICH)


def _pmix(environ: Environ) -> World | None:
    if "PMIX_RANK" not in environ:
        return None
    if "SLURM_STEP_ID" in environ:
        return _slurm(environ)
    raise WorldError(
        f"PMIX_RANK={environ['PMIX_RANK']} is set, but PMIx has no variable for the number of workers.",
        fix="Export HORA_RANK, HORA_SIZE, HORA_LOCAL_RANK, HORA_LOCAL_SIZE, HORA_HOST_INDEX and "
        "HORA_HOST_COUNT in the job script, or start the workers with `hora run`.",
    )


def _slurm(environ: Environ) -> World | None:
    # A batch script's own shell has SLURM_PROCID=0 and SLURM_NTASKS=N, but it is not one of N workers:
    # only `srun` starts workers, and only there SLURM_STEP_ID and the STEP counts are set.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    hosts_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    layout_name = (
        "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in environ else "SLURM_TASKS_PER_NODE"
    )
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_NODEID", hosts_name)
    values = _all_or_none(environ, names, source="Slurm")
    assert values is not None
    rank, size, local_rank, host_index, host_count = values
    if host_count == 1:
        local_size = size
    elif layout_name in environ:
        layout = _tasks_per_node(layout_name, environ[layout_name])
        if len(layout) != host_count or sum(layout) != size:
            raise WorldError(
                f"{layout_name}={environ[layout_name]} describes {len(layout)} hosts with {sum(layout)} "
                f"workers, but {hosts_name}={host_count} and {size_name}={size}.",
                fix="Start the workers with one plain `srun`, without editing its variables.",
            )
        local_size = layout[host_index] if 0 <= host_index < host_count else 1
    else:
        raise WorldError(
            f"{layout_name} is missing, so the number of workers on this host is unknown "
            f"({hosts_name}={host_count}, {size_name}={size}).",
            fix="Start the workers with `srun`, which sets it.",
        )
    return _world(
        "Slurm",
        (*names, layout_name),
        environ,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_index=host_index,
        host_count=host_count,
    )


_READERS: tuple[Callable[[Environ], World | None], ...] = (_hora, _torchrun, _open_mpi, _mpich, _pmix, _slurm)


def _mpi(environ: Environ, source: str, names: tuple[str, str, str, str]) -> World | None:
    values = _all_or_none(environ, names, source=source)
    if values is None:
        return None
    rank, size, local_rank, local_size = values
    single_host = local_size == size
    return _world(
        source,
        names,
        environ,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host_index=0 if single_host else -1,
        host_count=1 if single_host else -1,
    )


def _hosts(
    environ: Environ, index_name: str, count_name: str, *, size: int, local_size: int
) -> tuple[int, int]:
    values = _all_or_none(environ, (index_name, count_name), source="torchrun")
    if values is not None:
        return values[0], values[1]
    return (0, 1) if local_size == size else (-1, -1)


def _all_or_none(environ: Environ, names: tuple[str, ...], *, source: str) -> list[int] | None:
    present = [name for name in names if name in environ]
    if not present:
        return None
    missing = [name for name in names if name not in environ]
    if missing:
        found = ", ".join(f"{name}={environ[name]}" for name in present)
        raise WorldError(
            f"The variables of {source} are incomplete: {found}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing.",
            fix=f"Set the missing ones, or unset {' '.join(present)} to run one worker.",
        )
    values = []
    for name in names:
        if not re.fullmatch(r"-?\d{1,9}", environ[name]):
            raise WorldError(
                f"{name}={environ[name]!r} is not a whole number.",
                fix=f"Let {source} set it, or unset it to run one worker.",
            )
        values.append(int(environ[name]))
    return values


def _world(source: str, names: tuple[str, ...], environ: Environ, **fields: int) -> World:
    try:
        return World(source=source, **fields)
    except WorldError as error:
        found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise WorldError(f"{error.what} The variables are {found}.", fix=error.fix) from None


def _tasks_per_node(name: str, text: str) -> list[int]:
    """Slurm's run-length form: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    layout: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise WorldError(
                f"{name}={text!r} is not of Slurm's form, such as 2(x3),1.",
                fix="Start the workers with `srun`, which sets it.",
            )
        layout += [int(match[1])] * int(match[2] or 1)
    return layout
