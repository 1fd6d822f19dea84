"""How a rank is started: its command line, its environment, the descriptors it inherits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from hora.core.rundir import RunDirectory
from hora.launch import _worker, horovod
from hora.launch._guard import Ends
from hora.launch.job import HOST, FunctionTarget, Job, ModuleTarget, rank_environment

__all__ = ["RankStarter", "Starter", "allow_descriptors", "free_port"]

PIPE_BYTES = 1 << 18
"""Wanted capacity of an output pipe: fewer switches between rank and launcher than with Linux's 64 KiB."""

F_SETPIPE_SZ = 1031
"""From <linux/fcntl.h>; named in fcntl from Python 3.10 on, on Linux only."""

DESCRIPTORS_PER_RANK = 6
SPARE_DESCRIPTORS = 64

ENGINE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Which network the engines use, where the user has not said it."""


class Starter:
    """Starts the ranks of one job.

    Attributes:
        failures: read end of the pipe on which ranks say that they have failed.
        status: read end of rank 0's status pipe.
    """

    def __init__(self, job: Job, run: RunDirectory, job_id: str) -> None:
        allow_descriptors(job.workers * DESCRIPTORS_PER_RANK + SPARE_DESCRIPTORS)
        self._job = job
        self._run = run
        # Bound and listening before any rank starts, and inherited by rank 0: nobody can take the port.
        self._store = socket.create_server((HOST, 0), backlog=max(128, 2 * job.workers))
        self.failures, self._failures_writer = os.pipe()
        self.status, self._status_writer = os.pipe()
        self._environment = rank_environment(job) | self._shared(job_id)
        for fd in (self.failures, self.status):
            os.set_blocking(fd, False)
        # -W, -X and the like hold for the ranks too, as multiprocessing does it.
        flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
        self._python = [sys.executable, *flags, _worker.__file__]

    def start(self, number: int, guard: Ends) -> subprocess.Popen[bytes]:
        """Start one rank, with its stdout and stderr as unbuffered, non-blocking pipes."""
        inherited, environment = self._of_rank(number)
        environment = self._environment | environment | dict(guard.environment)
        process = subprocess.Popen(
            [
                *self._python,
                str(os.getpid()),
                str(self._run.failure(number)),
                str(self._failures_writer),
                str(guard.stack),
                *self._what(),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            pass_fds=[self._failures_writer, *inherited, *guard.inherited],
            start_new_session=True,
        )
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                _enlarge(pipe.fileno())
        return process

    def _of_rank(self, number: int) -> tuple[list[int], dict[str, str]]:
        """Descriptors and variables of one rank."""
        environment = {
            "HORA_RANK": str(number),
            "HORA_LOCAL_RANK": str(number),
            "RANK": str(number),
            "LOCAL_RANK": str(number),
        }
        if self._environment.get("HORA_HOROVOD") == "1":
            environment |= horovod.rank_variables(number, self._job.workers)
        if number != 0:
            return [], environment
        environment["HORA_STORE_FD"] = str(self._store.fileno())
        environment["HORA_STATUS_FD"] = str(self._status_writer)
        return [self._store.fileno(), self._status_writer], environment

    def started(self) -> None:
        """All ranks run: give up the ends that are theirs."""
        self._store.close()
        for fd in (self._failures_writer, self._status_writer):
            os.close(fd)
        self._failures_writer = self._status_writer = -1

    def close(self) -> None:
        """Close what is still open."""
        self._store.close()
        for fd in (self._failures_writer, self._status_writer, self.failures, self.status):
            if fd >= 0:
                os.close(fd)

    def _shared(self, job_id: str) -> dict[str, str]:
        size = str(self._job.workers)
        return {
            "HORA_SIZE": size,
            "HORA_LOCAL_SIZE": size,
            "HORA_HOST_INDEX": "0",
            "HORA_HOST_COUNT": "1",
            "HORA_STORE": f"tcp://{HOST}:{self._store.getsockname()[1]}",
            "HORA_RUN_DIR": str(self._run.path),
            "HORA_JOB": job_id,
            "HORA_ATTEMPT": str(self._run.attempt),
            "HORA_NOTICES": f"{self._failures_writer}:{os.fstat(self._failures_writer).st_ino}",
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(free_port()),
        }

    def _what(self) -> list[str]:
        target = self._job.target
        if isinstance(target, FunctionTarget):
            return ["function", str(target.payload), str(target.results)]
        if isinstance(target, ModuleTarget):
            return ["module", target.name, *self._job.arguments]
        return ["script", target.path, *self._job.arguments]


class RankStarter(Starter):
    """Starts the ranks of this host, of a job that has several.

    Attributes:
        variables: what is set for each of them besides.
    """

    def __init__(self, job: Job, run: RunDirectory, job_id: str) -> None:
        super().__init__(job, run, job_id)
        self.variables: dict[int, dict[str, str]] = {}

    def serve(self, store: socket.socket) -> None:
        """Rank 0 gets this listening socket for the store."""
        self._store.close()
        self._store = store

    def _of_rank(self, number: int) -> tuple[list[int], dict[str, str]]:
        descriptors, environment = super()._of_rank(number)
        chosen = {
            name: value
            for name, value in self.variables[number].items()
            if not (name in ENGINE_VARIABLES and name in self._environment)  # the user's own stay
        }
        environment |= chosen
        if self._environment.get("HORA_HOROVOD") == "1":
            names = {"LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_SIZE"}
            names |= {"CROSS_RANK": "HOST_INDEX", "CROSS_SIZE": "HOST_COUNT", "SIZE": "SIZE"}
            environment |= {f"HOROVOD_{one}": chosen[f"HORA_{other}"] for one, other in names.items()}
        return descriptors, environment


def free_port() -> int:
    """A port that is free now, for scripts that use torch.distributed alone and bind MASTER_PORT in rank 0.

    It cannot be held for them: a bound socket would be in the way of servers that bind without SO_REUSEADDR.
    """
    with socket.create_server((HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def allow_descriptors(wanted: int) -> None:
    """Raise the limit of open descriptors to as many as are wanted, or as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _enlarge(pipe: int) -> None:
    if sys.platform != "linux":
        return
    import fcntl

    try:
        fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:  # over the user's limit for pipe memory; the usual size works too
        return
