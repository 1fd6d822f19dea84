"""What ``hvd.init()``, process sets and the timeline have in common on all frameworks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from hora.adapter import process_sets
from hora.adapter.context import Common
from hora.adapter.negotiation.connect import connect
from hora.adapter.negotiation.coordinator import Coordinator
from hora.adapter.negotiation.errors import HorovodInternalError
from hora.adapter.negotiation.match import Table
from hora.adapter.negotiation.options import Options
from hora.adapter.negotiation.timeline import Trace
from hora.core.errors import NotInitializedError
from hora.core.settings import Settings, load

__all__ = [
    "Negotiating",
    "add_process_set",
    "asks_for_dynamic_sets",
    "check_comm",
    "ids_and_ranks",
    "meet",
    "not_initialized",
    "remove_process_set",
    "settings_of_horovod",
    "start_timeline",
]


class Negotiating(Protocol):
    """What a framework's session has."""

    @property
    def context(self) -> Common:
        """The job."""

    @property
    def client(self) -> Any:
        """This rank's side of the negotiation."""

    @property
    def trace(self) -> Trace:
        """The timeline; only rank 0's is ever started."""

    @property
    def dynamic(self) -> bool:
        """Whether process sets may be added later."""


def not_initialized(function: str) -> NotInitializedError:
    """The error of a function that was called too early, or too late."""
    return NotInitializedError(
        f"Horovod has not been initialized: hvd.{function}() was called before hvd.init().",
        fix="Call hvd.init() once, at the start of the script.",
    )


def asks_for_dynamic_sets(given: Any) -> bool:
    """Whether the argument ``process_sets`` of ``init`` is ``"dynamic"``.

    Raises:
        ValueError: it is another text.
    """
    if isinstance(given, str) and given.lower() != "dynamic":
        raise ValueError(f'process_sets={given!r}: give a list of ProcessSet, or "dynamic".')
    return isinstance(given, str)


def settings_of_horovod() -> Settings:
    """The settings, with Horovod's variable for the timeout."""
    settings = load()
    if "HOROVOD_GLOO_TIMEOUT_SECONDS" in os.environ and "HORA_TIMEOUT" not in os.environ:
        with contextlib.suppress(ValueError):
            return replace(settings, timeout=float(os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"]))
    return settings


def check_comm(comm: Any, size: int) -> None:
    """Raise ValueError unless ``comm`` are all ranks, in whichever form."""
    if comm is None:
        return
    if isinstance(comm, list | tuple) and (not comm or sorted(comm) == list(range(size))):
        return
    raise ValueError(
        f"comm={comm!r}: subsets of ranks and MPI communicators need MPI, which Hora does not use. "
        "Write hvd.init(process_sets=[hvd.ProcessSet([0, 1])]) instead."
    )


def meet(
    context: Common,
    found: Options,
    trace: Trace,
    *,
    publish: Callable[[str], object],
    published: Callable[[], str | bytes],
) -> tuple[Coordinator | None, socket.socket, socket.socket]:
    """Start the coordinator on rank 0, and connect to it.

    Args:
        context: the job.
        found: Horovod's variables.
        trace: of rank 0.
        publish: puts on rank 0 where the coordinator is into the store.
        published: waits for that on the others.

    Returns:
        The coordinator, where it runs; this rank's connections for control and alarm.
    """
    if context.world.rank:
        host, port, token = json.loads(published())
        return None, *connect(host, port, token, rank=context.world.rank)
    one_host = context.world.host_count == 1
    sets = {number: made.members for number, made in context.process_sets.items()}
    table = Table(context.world.size, sets=sets, next_set=context.next_process_set)
    coordinator = Coordinator(table, found, trace, address="127.0.0.1" if one_host else "0.0.0.0")
    control, alarm = coordinator.attach()
    host = "127.0.0.1" if one_host else _own_address(context)
    publish(json.dumps([host, coordinator.port, coordinator.token]))
    coordinator.start()
    return coordinator, control, alarm


def add_process_set(made: Negotiating, added: process_sets.ProcessSet) -> None:
    """Make a process set usable.

    Raises:
        ValueError: process sets are not dynamic, or such a set exists or cannot exist.
        HorovodInternalError: the ranks give different sets.
    """
    if not made.dynamic:
        raise ValueError(
            "Process sets can be added after init only if they are dynamic: write "
            'hvd.init(process_sets="dynamic") or set HOROVOD_DYNAMIC_PROCESS_SETS=1.'
        )
    process_sets.refuse_used(added)
    process_sets.check(added, made.context)
    made.client.add_process_set(added)


def remove_process_set(made: Negotiating, process_set: process_sets.ProcessSet) -> bool:
    """Give up a process set; whether it was in use.

    Raises:
        ValueError: process sets are not dynamic.
    """
    if not made.dynamic:
        raise ValueError(
            'Process sets can be removed only if they are dynamic: hvd.init(process_sets="dynamic").'
        )
    if isinstance(process_set, process_sets.Everyone) or process_set.process_set_id is None:
        return False
    if made.context.process_sets.get(process_set.process_set_id) is None:
        return False
    made.client.remove_process_set(process_set)
    return True


def ids_and_ranks(made: Negotiating) -> dict[int, list[int]]:
    """The ranks of each process set in use, by its id."""
    sets = {0: list(range(made.context.world.size))}
    return sets | {number: list(found.members) for number, found in made.context.process_sets.items()}


def start_timeline(made: Negotiating, file_path: str, *, mark_cycles: bool) -> None:
    """Record the operations from now on, on rank 0."""
    if made.context.world.rank == 0:
        made.trace.start(file_path, mark_cycles=mark_cycles)


def _own_address(context: Common) -> str:
    """Where the other hosts reach rank 0: it serves the store that they have found already."""
    store = context.settings.store
    host = urlsplit(store).hostname if store else os.environ.get("MASTER_ADDR")
    if host is None:
        raise HorovodInternalError(
            "Rank 0 does not know its own address. Export MASTER_ADDR and MASTER_PORT in the job script."
        )
    return host
