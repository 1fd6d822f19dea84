"""``hvd.init()`` and ``hvd.shutdown()``: the job, and the negotiation on top of it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import functools
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hora.adapter.negotiation import session as shared
from hora.adapter.negotiation.coordinator import Coordinator
from hora.adapter.negotiation.options import Options, options
from hora.adapter.negotiation.timeline import Trace
from hora.torch import _context, _member, _process_sets, _request
from hora.torch._context import Context
from hora.torch._process_sets import ProcessSet, global_process_set
from hora.torch.horovod._client import Client

__all__ = ["Session", "init", "is_initialized", "session", "shutdown"]


@dataclass(eq=False)
class Session:
    """What one ``hvd.init()`` made.

    Attributes:
        context: the job.
        group: of all ranks, for the data of negotiated operations alone; the script's own calls of
            ``torch.distributed``, in another order than theirs, travel on another.
        client: this rank's side of the negotiation.
        coordinator: the other side, on rank 0.
        trace: the timeline; only rank 0's is ever started.
        dynamic: whether process sets may be added later.
        optimizer_names: how many optimizers reduce gradients in a process set under a name, lest they clash.
        owns_job: whether ``shutdown`` leaves the job, too: not if the script called ``hora.torch.init``.
    """

    context: Context
    group: dist.ProcessGroup
    client: Client
    coordinator: Coordinator | None
    trace: Trace
    options: Options
    dynamic: bool
    optimizer_names: dict[tuple[int, str], int]
    owns_job: bool


_session: Session | None = None
_generation = 0
_coordinators: list[Coordinator] = []
"""Those of sessions that have ended here, and go on for ranks that have not."""
_dynamic = False
"""Whether process sets were dynamic once: as in Horovod, they then are after the next ``init``, too."""
_pid = -1
"""The process that called ``init``; a forked child has another."""


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job. A second call changes nothing, but for ``"dynamic"``, until :func:`shutdown`.

    Args:
        comm: None, or a list of all ranks. Horovod's subsets of ranks and MPI communicators need MPI.
        process_sets: sets to make usable at once, the same on every rank; or ``"dynamic"``, to add them
            later with :func:`add_process_set`, in this job and after the next ``init``.

    Raises:
        ValueError: another ``comm``, or process sets that cannot be made.
        WorldError: the ranks do not find each other (see ``hora.torch.init``).
    """
    global _session, _dynamic, _pid
    _dynamic = shared.asks_for_dynamic_sets(process_sets) or _dynamic
    if _session is not None and _session.context.pid == os.getpid():
        _session.dynamic = _session.dynamic or _dynamic
        return
    _pid = os.getpid()
    found = options()
    dynamic = found.dynamic_sets or _dynamic
    owns_job = not _context.is_initialized()
    if owns_job:
        _context.init(settings=shared.settings_of_horovod())
    context = _context.context()
    try:
        shared.check_comm(comm, context.world.size)
        _session = _negotiate(context, found, dynamic=dynamic, owns_job=owns_job)
        if process_sets is not None and not isinstance(process_sets, str):
            add_all(process_sets)
    except BaseException as error:
        shutdown() if _session is not None else _context.shutdown()
        if isinstance(error, Exception) and context.member is not None and context.member.is_breaking():
            init(comm, process_sets)  # the world broke while its workers met: there is another
            return
        raise
    if context.member is not None:
        _tell_place(context)
    if found.timeline and found.timeline != "DYNAMIC" and context.world.rank == 0:
        _session.trace.start(found.timeline, mark_cycles=found.mark_cycles)


def shutdown() -> None:
    """Leave the job. Operations of this rank that wait fail, and those of others that wait for it.

    Without ``init()`` it does nothing. ``init()`` may be called again, any number of times.
    """
    global _session
    ended, _session = _session, None
    if ended is None or ended.context.pid != os.getpid():
        return
    _end(ended, abrupt=False)
    if ended.owns_job:
        _context.shutdown()


def is_initialized() -> bool:
    """Whether ``init()`` was called and ``shutdown()`` was not."""
    return _session is not None


def session(function: str) -> Session:
    """The session, for ``function``, which is named in the error when there is none.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    if _session is None:
        raise shared.not_initialized(function)
    return _session


def add_all(process_sets: Iterable[ProcessSet]) -> None:
    """Make several sets usable, on all ranks in the same order."""
    current = session("add_process_set")
    for process_set in process_sets:
        if process_set is not global_process_set:
            _process_sets.check(process_set, current.context)
            current.client.add_process_set(process_set)


def _negotiate(context: Context, found: Options, *, dynamic: bool, owns_job: bool) -> Session:
    global _generation
    trace = Trace()
    timeout = datetime.timedelta(seconds=context.settings.timeout)
    with _member.meeting(context.member) as groups:
        group: dist.ProcessGroup = dist.new_group(timeout=timeout)
        groups.append(group)
    store: Any = dist.distributed_c10d._get_default_store()
    number = _generation if context.member is None else context.generation
    key = f"horovod/{number}/coordinator"  # the store may be that of an earlier negotiation, too
    _generation += 1
    coordinator, control, alarm = shared.meet(
        context,
        found,
        trace,
        publish=functools.partial(store.set, key),
        published=functools.partial(store.get, key),
    )

    def change_set(process_set: ProcessSet, ranks: Sequence[int]) -> None:
        if ranks:
            _process_sets.register(process_set, context)
        else:
            _process_sets.remove_process_set(process_set)

    if context.member is not None and not context.member.alone:
        context.member.control.on_reset(functools.partial(_hang_up, control, alarm))
    client = Client(
        context, group, control, alarm, coordinator=coordinator, trace=trace, change_set=change_set
    )
    _request.use(client)
    made = Session(
        context=context,
        group=group,
        client=client,
        coordinator=coordinator,
        trace=trace,
        options=found,
        dynamic=dynamic,
        optimizer_names={},
        owns_job=owns_job,
    )
    try:
        client.wait_for_all(context.settings.timeout)
    except BaseException:
        _end(made, abrupt=True)
        raise
    return made


def _hang_up(*connections: socket.socket) -> None:
    """A rank is gone: whoever waits for an operation learns that it will not end."""
    for connection in connections:
        with contextlib.suppress(OSError):  # closed by now
            connection.shutdown(socket.SHUT_RDWR)


def _tell_place(context: Context) -> None:
    """For scripts that read Horovod's variables."""
    names = ("rank", "size", "local_rank", "local_size")
    for name in names:
        os.environ[f"HOROVOD_{name.upper()}"] = str(getattr(context.world, name))
    os.environ["HOROVOD_CROSS_RANK"] = str(context.peers.index(context.world.rank))
    os.environ["HOROVOD_CROSS_SIZE"] = str(len(context.peers))


def _end(ended: Session, *, abrupt: bool) -> None:
    _coordinators[:] = [coordinator for coordinator in _coordinators if coordinator.alive]
    _request.use(None)
    free = ended.client.close(abrupt=abrupt)
    if ended.coordinator is not None:
        _coordinators.append(ended.coordinator)
    ended.trace.stop()
    if free:
        dist.destroy_process_group(ended.group)
    else:
        # The executor is stuck in the engine, since a rank is gone. Closing the groups would wait for it.
        for held in (ended.context.group, ended.group, *ended.context.pending):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


@atexit.register
def _at_exit() -> None:
    """Runs before ``hora.torch``'s own, which closes the group."""
    global _session
    if _pid != os.getpid():
        return
    failed = getattr(sys, "last_value", None) is not None
    ended, _session = _session, None
    if ended is not None:
        _end(ended, abrupt=failed)
    # The others may have things to do without this rank; what they ask of it fails at once.
    for coordinator in _coordinators:
        coordinator.stop() if failed else coordinator.join()
