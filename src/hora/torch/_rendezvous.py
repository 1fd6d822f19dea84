"""How the ranks find each other, and the process group they form.

In this order: ``HORA_STORE`` (set by ``hora run``), ``MASTER_ADDR`` and ``MASTER_PORT`` (set by
``torchrun``, or by hand), and for the ranks of one host started by MPI or Slurm a file in the
temporary directory, named after the job.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions have the default group of the moment of import as their default argument. Imported later
# (torch.optim does so) they would keep a group, and its threads, alive after shutdown().
import torch.distributed.nn.functional
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from hora.adapter.hosts import grouped, host_number
from hora.adapter.meeting import address, claim, disclaim
from hora.core.errors import WorldError
from hora.core.settings import Settings
from hora.core.world import World, from_environment
from hora.torch.engines import Group, Insist

__all__ = ["PATIENT", "Meeting", "engines", "forget_store", "from_launcher", "meet", "restore", "world"]


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The group in which the ranks met.

    Attributes:
        world: the world, hosts filled in where the launcher did not tell them.
        peers: ranks of the job that have this worker's local rank, by host.
        environment: variables set for the group's life, with their former values.
        file: where the ranks met, if in a file.
        homogeneous: whether every host has the same number of workers.
    """

    world: World
    group: dist.ProcessGroup
    peers: tuple[int, ...]
    environment: dict[str, str | None] = field(default_factory=dict)
    file: Path | None = None
    homogeneous: bool = True


PATIENT = frozenset({"gloo", "shared-memory"})
"""Engines that go on with an operation that was waited for with a limit, after the limit."""

REFUSED_FOR = datetime.timedelta(seconds=0.5)
"""How long torch tries to connect to a port on which nobody listens, twice. It waits without a limit for the
answer of one that listens, and no other thread can end its tries."""

_stores: dict[str, Store] = {}
"""Stores that live as long as the process: rank 0 serves the others even between two ``init()``."""


def from_launcher(world: World | None) -> World:
    """``world``, or what the launch variables say."""
    return from_environment() if world is None else world


def world(given: World | None) -> World:
    """The world of a script that made its own group: it must agree with the group.

    Raises:
        WorldError: rank or size differ from the group's.
    """
    found = from_launcher(given)
    rank, size = dist.get_rank(), dist.get_world_size()
    if (found.rank, found.size) != (rank, size):
        raise WorldError(
            f"torch.distributed is initialized with rank {rank} of {size}, but {_origin(found)} rank "
            f"{found.rank} of {found.size}.",
            fix=f"Call hora.torch.init() first, or give it World(rank={rank}, size={size}, ...).",
        )
    return found


def engines(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> engine of a group: ``{"cpu": "gloo", "cuda": "nccl"}``, ``{"cpu": "shared-memory"}``."""
    if isinstance(group, Group):
        return {"cpu": "shared-memory"}
    found = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    if found.get("cuda") == "gloo":
        del found["cuda"]  # torch names Gloo for every device; it would copy through the host
    if found.get("cpu") == "hora":
        found["cpu"] = "gloo"  # its ranks could not share memory
    return found


def meet(world: World, settings: Settings, *, generation: int, cuda: bool) -> Meeting:
    """Form the group of all ranks.

    Args:
        world: this worker's place.
        settings: the timeout, and the store that the launcher chose.
        generation: how many groups this process made before; keeps the keys of each apart.
        cuda: whether the ranks compute on GPUs.

    Raises:
        WorldError: there is no way to meet, a rank does not come in time, or memory that must be shared
            cannot be.
    """
    if dist.is_initialized():
        if settings.engine == "shared-memory" and "shared-memory" not in engines(_default_group()).values():
            raise WorldError(
                f"HORA_ENGINE=shared-memory, but the script made a group of {dist.get_backend()!r} itself.",
                fix='Write torch.distributed.init_process_group("hora"), or unset HORA_ENGINE.',
            )
        world, peers, homogeneous = _agree_on_hosts(world)
        return Meeting(world=world, group=_default_group(), peers=peers, homogeneous=homogeneous)
    environment: dict[str, str | None] = {}
    timeout = datetime.timedelta(seconds=settings.timeout)
    hook = sys.excepthook
    try:
        if world.host_count == 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
            _set_loopback(environment)
        base, file = _store(world, settings, timeout=timeout, generation=generation)
        store = PrefixStore(f"hora/{generation}", base)
        store.set_timeout(timeout)
        store.set(f"came/{world.rank}", "1")
        with _explain_absence(store, world, settings):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo" if settings.engine == "gloo" else "hora",
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
                pg_options=Insist() if settings.engine == "shared-memory" and not cuda else None,
            )
            # torch prefixes tracebacks with the rank; the launcher does that for all output.
            sys.excepthook = hook
            # Nobody goes on, or ends and takes the store away, before all have their connections.
            world, peers, homogeneous = _agree_on_hosts(world)
    except BaseException:
        sys.excepthook = hook
        if dist.is_initialized():
            dist.destroy_process_group()
        restore(environment)
        raise
    return Meeting(
        world=world,
        group=_default_group(),
        peers=peers,
        environment=environment,
        file=file,
        homogeneous=homogeneous,
    )


def forget_store(url: str) -> bool:
    """Give up a store that no world uses any more; whether there was one."""
    disclaim(url)
    return _stores.pop(url, None) is not None


def restore(environment: dict[str, str | None]) -> None:
    """Give the variables that :func:`meet` set their former values."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _origin(world: World) -> str:
    return "no launcher was found, which means" if world.source == "none" else f"{world.source} says"


def _set_loopback(environment: dict[str, str | None]) -> None:
    """On one host the ranks talk over loopback: host names of laptops and containers often do not resolve."""
    names = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in names:
            environment["GLOO_SOCKET_IFNAME"] = None
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _store(
    world: World, settings: Settings, *, timeout: datetime.timedelta, generation: int
) -> tuple[Store, Path | None]:
    """The store, and its file if it has one."""
    if world.size == 1:
        return HashStore(), None
    where = address(world, settings)
    claim(where, "hora.torch")
    if where.path is not None:
        return _file_store(where.path, world, generation=generation)
    if where.told_by == "HORA_STORE":
        return _tcp_store(where.host, where.port, world, settings, timeout=timeout), None
    return _env_store(f"env://{where.host}:{where.port}", world, timeout=timeout), None


def _file_store(path: Path, world: World, *, generation: int) -> tuple[Store, Path]:
    path = path.with_name(f"{path.name}.{generation}")
    return FileStore(str(path), world.size), path  # removes the file when the last rank closes it


def _tcp_store(
    host: str, port: int, world: World, settings: Settings, *, timeout: datetime.timedelta
) -> Store:
    key = f"tcp://{host}:{port}"
    if key not in _stores:
        serves = world.rank == 0
        # In an elastic job somebody listens before a rank knows the port. Where nobody does, rank 0 has died.
        short = settings.elastic_fd is not None and not serves
        _stores[key] = TCPStore(
            host,
            port,
            world.size,
            is_master=serves,
            timeout=REFUSED_FOR if short else timeout,
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=settings.store_fd if serves else None,
        )
        _stores[key].set_timeout(timeout)
    return _stores[key]


def _env_store(key: str, world: World, *, timeout: datetime.timedelta) -> Store:
    if key not in _stores:
        # torch's own rule of who serves: torchrun's agent does, rank 0 elsewhere.
        _stores[key], _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=timeout)))
    return _stores[key]


@contextlib.contextmanager
def _explain_absence(store: Store, world: World, settings: Settings) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        absent = [rank for rank in range(world.size) if not _came(store, rank)]
        if not absent:
            raise WorldError(
                f"The {world.size} ranks met, but could not connect to each other: {error}",
                fix="If the hosts have several networks, set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to "
                "the one they share.",
            ) from error
        names = ", ".join(map(str, absent))
        raise WorldError(
            f"{'Rank' if len(absent) == 1 else 'Ranks'} {names} of {world.size} did not come within "
            f"{settings.timeout:g} s.",
            fix="Look at the log of the first of them, or raise HORA_TIMEOUT if starting takes longer.",
        ) from error


def _came(store: Store, rank: int) -> bool:
    try:
        return bool(store.check([f"came/{rank}"]))
    except RuntimeError:
        return True  # the store itself is gone, so nothing is known about this rank


def _agree_on_hosts(world: World) -> tuple[World, tuple[int, ...], bool]:
    """Find out which ranks share a host, which have this local rank, and whether hosts have as many.

    It is always also a barrier.
    """
    device = "cpu" if "cpu" in engines(_default_group()) else "cuda"
    mine = torch.tensor([host_number(world), world.local_rank], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    return grouped(world, [(int(place[0]), int(place[1])) for place in everyone])
