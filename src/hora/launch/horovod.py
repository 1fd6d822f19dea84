"""Running Horovod's scripts unchanged: the environment that makes ``import horovod.torch`` resolve to Hora,
the variables that such scripts read, and what becomes of the ``HOROVOD_*`` variables that users set.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.core.errors import LaunchError
from hora.launch.job import ModuleTarget, ScriptTarget, Target

__all__ = ["HONOURED", "SHIMS", "environment", "explain", "rank_variables", "run_function", "target"]

SHIMS = Path(__file__).parent / "shims"
"""Folder with a package ``horovod``, put in front of the ranks' ``PYTHONPATH``."""

EXEC = Path(__file__).parent / "_exec.py"

HONOURED = {
    "HOROVOD_FUSION_THRESHOLD": "bytes up to which operations that are ready together are joined",
    "HOROVOD_STALL_CHECK_DISABLE": "1: no report of operations that only some ranks ask for",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "seconds until that report",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "seconds until such operations fail",
    "HOROVOD_TIMELINE": "file of the timeline, or DYNAMIC",
    "HOROVOD_TIMELINE_MARK_CYCLES": "1: mark each release of operations in it",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1: process sets may be added after init",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "seconds that a collective waits for other ranks (as HORA_TIMEOUT)",
    "HOROVOD_GLOO_IFACE": "network interface of the engine (as GLOO_SOCKET_IFNAME)",
}
"""Variables with a meaning here."""

_PER_RANK = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")

_NO_CYCLE = "Hora has no cycle: operations start when the last rank asks for them"
_ONE_HOST = "the engine chooses its own algorithm"
_NO_TUNING = "there is no cycle time or threshold to tune: batches grow with the load by themselves"

UNUSED = {
    "CYCLE_TIME": _NO_CYCLE,
    "CACHE_CAPACITY": "negotiation has no response cache to size",
    "HIERARCHICAL_ALLREDUCE": _ONE_HOST,
    "HIERARCHICAL_ALLGATHER": _ONE_HOST,
    "TORUS_ALLREDUCE": _ONE_HOST,
    "AUTOTUNE": _NO_TUNING,
    "LOG_LEVEL": "Hora logs nothing but errors and stalls",
    "LOG_HIDE_TIME": "Hora logs nothing but errors and stalls",
    "NUM_NCCL_STREAMS": "NCCL runs on torch.distributed's own stream",
    "BATCH_D2D_MEMCOPIES": "torch.distributed copies between GPU buffers itself",
    "DISABLE_GROUP_FUSION": "groups are one operation of the engine anyway",
    "ENABLE_ASYNC_COMPLETION": "operations complete asynchronously anyway",
    "DISABLE_NVTX_RANGES": "Hora sets no NVTX ranges",
    "THREAD_AFFINITY": "the executor thread is not pinned; use taskset for the job",
    "MPI_THREADS_DISABLE": "Hora does not use MPI",
    "CPU_OPERATIONS": "tensors on the CPU always travel by Gloo",
    "CONTROLLER": "there is one controller, Hora's own",
    "CCL_CACHE": "Hora does not use oneCCL",
    "ADASUM_MPI_CHUNK_SIZE": "Adasum here does not use MPI",
    "ENABLE_XLA_OPS": "it is about TensorFlow",
    "START_TIMEOUT": "write HORA_TIMEOUT for how long the start may take",
    "ELASTIC": "write hora run --min-workers, or horovodrun --min-np, for an elastic job",
    "SPARK": "Hora does not run on Spark",
    "GLOO_RENDEZVOUS": "the ranks meet at HORA_STORE, which the launcher sets",
    "SECRET_KEY": "the launcher makes a token for each job itself",
} | dict.fromkeys(
    (
        *("WITH", "WITHOUT", "GPU", "NCCL", "BUILD", "CMAKE", "DEBUG", "CUDA", "ROCM", "NVTX"),
        *("ALLOW_MIXED_GPU_IMPL", "SKIP_COMPILE", "LOCAL_VERSION"),
    ),
    "Hora has nothing to compile",
)

_RUN_UNUSED = dict.fromkeys(
    ("slots", "reset_limit", "cooldown_range"), "elastic jobs are started with horovodrun"
) | {
    "ssh_port": "Hora starts workers on this host",
    "ssh_identity_file": "Hora starts workers on this host",
    "use_mpi": "Hora does not use MPI",
    "mpi_args": "Hora does not use MPI",
    "output_filename": "hora.run(function, run_dir=...) keeps the output of each rank",
    "executable": "the workers are of this Python",
}
"""Arguments of ``horovod.run`` that change nothing."""


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for all ranks of a job of Horovod scripts.

    Args:
        environ: what they would get otherwise; its ``PYTHONPATH`` follows ours.
    """
    environ = os.environ if environ is None else environ
    path = [str(SHIMS), *(part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part)]
    found = {"HORA_HOROVOD": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}
    if "HOROVOD_GLOO_IFACE" in environ and "GLOO_SOCKET_IFNAME" not in environ:
        found["GLOO_SOCKET_IFNAME"] = environ["HOROVOD_GLOO_IFACE"]
    return found


def rank_variables(number: int, size: int) -> dict[str, str]:
    """What Horovod's launcher sets for each rank, and scripts read."""
    values = (number, size, number, size, 0, 1, socket.gethostname())
    named = {f"HOROVOD_{name}": str(value) for name, value in zip(_PER_RANK, values, strict=True)}
    return named | {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


def explain(environ: Mapping[str, str] | None = None) -> list[str]:
    """One line for each ``HOROVOD_*`` variable that the user set and that has no effect: why not."""
    environ = os.environ if environ is None else environ
    if "HORA_JOB" in environ:
        return []  # a rank's environment: the outer launcher has told it
    lines = []
    for key in sorted(environ):
        name = key.removeprefix("HOROVOD_")
        if not key.startswith("HOROVOD_") or key in HONOURED or name in _PER_RANK:
            continue
        reason = UNUSED.get(name) or next(
            (text for known, text in UNUSED.items() if name.startswith(known + "_")), None
        )
        lines.append(f"{key} has no effect: {reason or 'Hora has no such setting'}.")
    return lines


def target(command: Sequence[str]) -> tuple[Target, list[str], str]:
    """What a command line after ``horovodrun ...`` runs, its arguments, and what to call the run.

    ``python script.py`` and ``python -m module`` of this Python run inside the rank itself, so that a
    failure is reported with its traceback; any other program replaces the rank.

    Raises:
        LaunchError: there is no such program.
    """
    name, *rest = command
    if name.endswith(".py") and Path(name).exists():
        return ScriptTarget(name), rest, Path(name).stem
    program = shutil.which(name)
    if program is None:
        raise LaunchError(
            f"There is no program {name!r} to run.", fix="Write for example: horovodrun -np 2 python train.py"
        )
    if _same_python(program) and rest:
        if rest[0] == "-u":  # the ranks' output is unbuffered anyway
            rest = rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return ModuleTarget(rest[1]), rest[2:], rest[1].rpartition(".")[2]
        if rest and not rest[0].startswith("-"):
            return ScriptTarget(rest[0]), rest[1:], Path(rest[0]).stem or "script"
    return ScriptTarget(str(EXEC)), [program, *command[1:]], Path(name).stem


def run_function(  # noqa: PLR0917 - as Horovod
    func: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    network_interfaces: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """``horovod.run``: call a function on new workers of this host; their results, by rank.

    Args:
        func: what to call.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of workers; 1 if it is not given.
        min_num_proc: refused, as are ``max_num_proc``, ``hostfile`` and ``host_discovery_script``: they
            need other hosts or an elastic job.
        max_num_proc: see ``min_num_proc``.
        slots: no effect, as ``reset_limit`` and ``cooldown_range``: they are about elastic jobs.
        reset_limit: see ``slots``.
        cooldown_range: see ``slots``.
        hosts: this host only, as ``localhost:2``.
        hostfile: see ``min_num_proc``.
        host_discovery_script: see ``min_num_proc``.
        start_timeout: seconds that the start may take.
        ssh_port: no effect, as all others that say how Horovod starts its workers.
        ssh_identity_file: see ``ssh_port``.
        disable_cache: see ``ssh_port``.
        output_filename: see ``ssh_port``; ``hora.run`` keeps the output in its run directory.
        verbose: see ``ssh_port``.
        use_gloo: see ``ssh_port``.
        use_mpi: see ``ssh_port``.
        mpi_args: see ``ssh_port``.
        network_interface: of the engine.
        executable: see ``ssh_port``: the workers are of this Python.
        network_interfaces: the newer name of ``network_interface``.
        np: the older name of ``num_proc``.
        min_np: the older name of ``min_num_proc``.
        max_np: the older name of ``max_num_proc``.
        env: variables added to the workers' environment.

    Raises:
        LaunchError: an argument that needs another host or an elastic job.
        JobFailedError: a worker failed.
    """
    from hora.launch.function import run

    for name, value in (
        ("hosts", None if hosts is None or only_this_host(hosts) else hosts),
        ("hostfile", hostfile),
        ("host_discovery_script", host_discovery_script),
        ("min_num_proc", min_num_proc or min_np),
        ("max_num_proc", max_num_proc or max_np),
    ):
        if value is not None:
            raise LaunchError(
                f"horovod.run({name}={value!r}) needs other hosts or an elastic job; Hora starts "
                "workers on this host.",
                fix=f"Leave out {name}.",
            )
    for name, given in (
        ("slots", slots), ("reset_limit", reset_limit), ("cooldown_range", cooldown_range),
        ("ssh_port", ssh_port), ("ssh_identity_file", ssh_identity_file), ("use_mpi", use_mpi),
        ("mpi_args", mpi_args), ("output_filename", output_filename), ("executable", executable),
    ):  # fmt: skip
        if given:
            print(f"horovod.run: {name}={given!r} has no effect: {_RUN_UNUSED[name]}.", file=sys.stderr)
    found = dict(env or {})
    if start_timeout is not None:
        found.setdefault("HORA_TIMEOUT", str(start_timeout))
    interface = network_interfaces or network_interface
    if interface is not None:
        found.setdefault("HOROVOD_GLOO_IFACE", interface)
    found |= environment({**os.environ, **found})
    return run(func, args, kwargs, workers=num_proc or np or 1, env=found)


def only_this_host(hosts: str) -> bool:
    """Whether ``host:slots,...`` names no other host than this one."""
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().partition(".")[0]}
    return all(entry.strip().partition(":")[0] in here for entry in hosts.split(",") if entry.strip())


def _same_python(program: str) -> bool:
    """Whether a program is the interpreter that runs the launcher, or its environment's name for it."""
    if not Path(program).name.startswith("python"):
        return False
    # Not resolved: the interpreters of all virtual environments are links to one file.
    return Path(program).parent.absolute() == Path(sys.executable).parent.absolute()
