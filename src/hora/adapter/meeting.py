"""Where the ranks meet, and the store that they have then.

In this order: ``HORA_STORE`` (set by ``hora run``), ``MASTER_ADDR`` and ``MASTER_PORT`` (set by
``torchrun``, or by hand), and for the ranks of one host started by MPI or Slurm a file in the
temporary directory, named after the job.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hora.core.errors import WorldError
from hora.core.rundir import replace_text
from hora.core.settings import Settings
from hora.core.store import Alone, Store
from hora.core.world import World

__all__ = ["Address", "address", "claim", "disclaim", "forget_file", "meet"]

REFUSED_FOR = 0.5
"""Seconds for which a rank of `hora run` tries a port on which nobody listens: there somebody does before it
starts, unless rank 0 has ended."""

PAUSES = (0.002, 0.05)
"""Seconds between two looks for the file of rank 0, growing: no event tells of a file on another host."""

_stores: dict[str, Store] = {}
"""Stores that live as long as the process: rank 0 serves the others even between two ``init()``."""

_claims: dict[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the ranks meet.

    Attributes:
        told_by: ``HORA_STORE``, ``MASTER_ADDR`` or ``file``.
        host: of rank 0; empty for a file.
        port: on which rank 0 listens.
        path: the file.
    """

    told_by: str
    host: str = ""
    port: int = 0
    path: Path | None = None

    def __str__(self) -> str:
        return f"tcp://{self.host}:{self.port}" if self.path is None else f"file://{self.path}"


def address(world: World, settings: Settings) -> Address:
    """Where the ranks of a job of several meet.

    Raises:
        WorldError: nothing tells, or ``HORA_STORE`` or ``MASTER_PORT`` is malformed.
    """
    if settings.store is not None:
        url = urlsplit(settings.store)
        if url.scheme == "file":
            return Address(told_by="HORA_STORE", path=Path(url.path))
        if url.scheme == "tcp" and url.hostname and url.port:
            return Address(told_by="HORA_STORE", host=url.hostname, port=url.port)
        raise WorldError(
            f"HORA_STORE={settings.store!r} is neither tcp://HOST:PORT nor file:///PATH.",
            fix="Let `hora run` set it, or write for example HORA_STORE=tcp://10.0.0.1:29400.",
        )
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and port:
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise WorldError(
                f"MASTER_PORT={port!r} is not a port.", fix="Write for example MASTER_PORT=29400."
            )
        return Address(told_by="MASTER_ADDR", host=host, port=int(port))
    if world.local_size == world.size and (key := _job_key()) is not None:
        name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        return Address(told_by="file", path=Path(tempfile.gettempdir()) / f"hora-{os.getuid()}-{name}")
    raise WorldError(
        f"Rank {world.rank} of {world.size} (from {world.source}) does not know where to meet the others.",
        fix="Export MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there) in the job script.",
    )


def claim(where: Address, module: str) -> None:
    """The ranks meet there for this adapter.

    Raises:
        WorldError: they have met there for another, whose store speaks another language.
    """
    other = _claims.setdefault(str(where), module)
    if other != module:
        raise WorldError(
            f"{module}.init() was called in a job whose ranks have met for {other} already, at {where}.",
            fix=f"Use one of {other} and {module} in a job; tensors go from one framework to another by "
            "numpy arrays or DLPack.",
        )


def disclaim(where: str) -> None:
    """Nobody meets there any more."""
    _claims.pop(where, None)


def meet(world: World, settings: Settings, *, module: str) -> Store:
    """The store of all ranks. The same one for each ``init()`` of a process.

    Args:
        world: this worker's place.
        settings: the timeout, and what the launcher chose and opened.
        module: the adapter, for messages: ``hora.jax``.

    Raises:
        WorldError: there is no way to meet, or rank 0 cannot listen or does not come in time.
    """
    if world.size == 1:
        return Alone(timeout=settings.timeout)
    where = address(world, settings)
    claim(where, module)
    key = str(where)
    if key not in _stores:
        if not _stores:
            atexit.register(_close)
        token = hashlib.blake2b((settings.job or "").encode(), digest_size=16).digest()
        make = _serve if world.rank == 0 else _connect
        _stores[key] = make(where, world, settings, token)
    return _stores[key]


def forget_file(world: World, settings: Settings) -> None:
    """All ranks have met: on rank 0, remove the file in which they found each other, if it was one."""
    if world.rank == 0 and world.size > 1 and (path := address(world, settings).path) is not None:
        path.unlink(missing_ok=True)


def _serve(where: Address, world: World, settings: Settings, token: bytes) -> Store:
    if settings.store_fd is not None and where.told_by == "HORA_STORE":
        listener = socket.socket(fileno=settings.store_fd)
    elif where.path is None:
        listener = _listen(where, world)
    else:
        host = "127.0.0.1" if world.host_count == 1 else ""
        listener = socket.create_server((host, 0), backlog=2 * world.size)
    port = listener.getsockname()[1]
    store = Store.serve(listener, size=world.size, timeout=settings.timeout, token=token)
    if where.path is not None:
        name = "127.0.0.1" if world.host_count == 1 else socket.gethostname()
        replace_text(where.path, f"{name}:{port}\n")
    return store


def _listen(where: Address, world: World) -> socket.socket:
    try:
        try:
            found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(found[4][:2], family=found[0], backlog=2 * world.size)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
                raise
            # The name is that of a gateway to this host, as in a container.
            return socket.create_server(("", where.port), backlog=2 * world.size)
    except OSError as error:
        agent = where.told_by == "MASTER_ADDR" and "TORCHELASTIC_RUN_ID" in os.environ
        raise WorldError(
            f"Rank 0 cannot listen on port {where.port} of {where.host}: {error}.",
            fix="Start the job with `hora run`, mpirun or srun: torchrun keeps this port for itself."
            if agent
            else "Export MASTER_ADDR (a name of rank 0's host) and MASTER_PORT (a free port there).",
        ) from error


def _connect(where: Address, world: World, settings: Settings, token: bytes) -> Store:
    rank, size, timeout = world.rank, world.size, settings.timeout
    if where.path is None:
        # Started by `hora run`, somebody listens before a rank knows the port.
        refused = REFUSED_FOR if settings.job is not None else None
        return Store.connect(
            where.host, where.port, rank=rank, size=size, timeout=timeout, token=token, refused=refused
        )
    deadline, pause = time.monotonic() + timeout, PAUSES[0]
    waits = threading.Event()  # a sleep that signals can end
    while True:
        host, _, port = _read(where.path).rpartition(":")
        left = deadline - time.monotonic()
        try:
            if port.isdecimal():
                store = Store.connect(
                    host, int(port), rank=rank, size=size, timeout=max(0.001, left), token=token, refused=0
                )
                store.timeout = timeout
                return store
        except WorldError:  # the file of a job that has ended, before rank 0 of this one replaces it
            if left <= pause:
                raise
        if left <= pause:
            raise WorldError(
                f"Rank 0 of {size} did not come within {timeout:g} s: it has not written {where.path}.",
                fix="Look at its log, or raise HORA_TIMEOUT if starting takes longer.",
            )
        waits.wait(pause)
        pause = min(2 * pause, PAUSES[1])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not yet there
        return ""


def _close() -> None:
    for store in _stores.values():
        store.close()


def _job_key() -> str | None:
    """A text that all ranks of this MPI or Slurm job share and no other job of this host does."""
    if "PMIX_NAMESPACE" in os.environ:
        return f"pmix {os.environ['PMIX_NAMESPACE']} {_launcher()}"
    if "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" in os.environ:
        restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
        return f"slurm {os.environ['SLURM_JOB_ID']} {os.environ['SLURM_STEP_ID']} {restarts}"
    launcher = _launcher()
    return None if launcher is None else f"parent {launcher}"


def _launcher() -> str | None:
    """Id and start time of the nearest ancestor that is not a rank itself: MPI's daemon on this host.

    A rank started through a shell script has the script as its parent, which carries the rank's
    variables; the daemon above it does not.
    """
    pid = os.getppid()
    marks = (b"PMI_RANK=", b"OMPI_COMM_WORLD_RANK=", b"PMIX_RANK=")
    with contextlib.suppress(OSError):
        while pid > 1:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            # Fields after the command's closing parenthesis; 4th is the parent, 22nd the start time.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if not any(variable.startswith(marks) for variable in variables):
                return f"{pid} {fields[19]}"
            pid = int(fields[1])
    return None
