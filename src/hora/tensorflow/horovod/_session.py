"""``hvd.init()`` and ``hvd.shutdown()``: the job, and the negotiation on top of it."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hora.adapter import process_sets
from hora.adapter.context import is_failing
from hora.adapter.negotiation import session as shared
from hora.adapter.negotiation.coordinator import Coordinator
from hora.adapter.negotiation.options import Options, options
from hora.adapter.negotiation.timeline import Trace
from hora.tensorflow import _context, _request
from hora.tensorflow._context import Context, current
from hora.tensorflow._process_sets import ProcessSet, global_process_set
from hora.tensorflow.horovod._client import Client

__all__ = ["Session", "add_all", "init", "is_initialized", "session", "shutdown"]


@dataclass(eq=False)
class Session:
    """What one ``hvd.init()`` made.

    Attributes:
        context: the job.
        client: this rank's side of the negotiation.
        coordinator: the other side, on rank 0.
        trace: the timeline; only rank 0's is ever started.
        dynamic: whether process sets may be added later.
        owns_job: whether ``shutdown`` leaves the job, too: not if the script called ``hora.tensorflow.init``.
    """

    context: Context
    client: Client
    coordinator: Coordinator | None
    trace: Trace
    dynamic: bool
    owns_job: bool


_session: Session | None = None
_coordinators: list[Coordinator] = []
"""Those of sessions that have ended here, and go on for ranks that have not."""
_generation = 0
_dynamic = False
"""Whether process sets were dynamic once: as in Horovod, they then are after the next ``init``, too."""


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the job. A second call changes nothing, but for ``"dynamic"``, until :func:`shutdown`.

    Args:
        comm: None, or a list of all ranks. Horovod's subsets of ranks and MPI communicators need MPI.
        process_sets: sets to make usable at once, the same on every rank; or ``"dynamic"``, to add them
            later with :func:`add_process_set`, in this job and after the next ``init``.

    Raises:
        ValueError: another ``comm``, or process sets that cannot be made.
        WorldError: the ranks do not find each other (see ``hora.tensorflow.init``).
    """
    global _session, _dynamic
    _dynamic = shared.asks_for_dynamic_sets(process_sets) or _dynamic
    if _session is not None and _session.context.pid == os.getpid():
        _session.dynamic = _session.dynamic or _dynamic
        return
    found = options()
    owns_job = not current.is_initialized()
    if owns_job:
        _context.init(settings=shared.settings_of_horovod())
    context = _context.context()
    try:
        shared.check_comm(comm, context.world.size)
        _session = _negotiate(context, found, dynamic=found.dynamic_sets or _dynamic, owns_job=owns_job)
        if process_sets is not None and not isinstance(process_sets, str):
            add_all(process_sets)
    except BaseException:
        shutdown() if _session is not None else _context.shutdown()
        raise
    if found.timeline and found.timeline != "DYNAMIC" and context.world.rank == 0:
        _session.trace.start(found.timeline, mark_cycles=found.mark_cycles)


def shutdown() -> None:
    """Leave the job. Operations of this rank that wait fail, and those of others that wait for it.

    Without ``init()`` it does nothing. ``init()`` may be called again, any number of times.
    """
    ended = _session
    if ended is None or ended.context.pid != os.getpid():
        return
    _end_session()
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


def add_all(sets: Iterable[ProcessSet]) -> None:
    """Make several sets usable, on all ranks in the same order."""
    made = session("add_process_set")
    for process_set in sets:
        if process_set is not global_process_set:
            process_sets.refuse_used(process_set)
            process_sets.check(process_set, made.context)
            made.client.add_process_set(process_set)


def _negotiate(context: Context, found: Options, *, dynamic: bool, owns_job: bool) -> Session:
    global _generation
    trace = Trace()
    key = context.key(f"horovod's coordinator {_generation}")
    _generation += 1
    coordinator, control, alarm = shared.meet(
        context,
        found,
        trace,
        publish=lambda place: context.store.set(key, place.encode()),
        published=lambda: context.store.get(key),
    )

    def change_set(process_set: ProcessSet, ranks: Sequence[int]) -> None:
        if ranks:
            process_sets.register(process_set, context)
        else:
            process_sets.remove(process_set, context)

    client = Client(context, control, alarm, coordinator=coordinator, trace=trace, change_set=change_set)
    _request.use(client)
    made = Session(
        context=context,
        client=client,
        coordinator=coordinator,
        trace=trace,
        dynamic=dynamic,
        owns_job=owns_job,
    )
    try:
        client.wait_for_all(context.settings.timeout)
    except BaseException:
        _end(made, abrupt=True)
        raise
    if _end_session not in _context.before_leaving:
        _context.before_leaving.append(_end_session)
    return made


def _end_session() -> None:
    """The negotiation ends before the job does."""
    global _session
    ended, _session = _session, None
    if ended is not None and ended.context.pid == os.getpid():
        _end(ended, abrupt=is_failing())


def _end(ended: Session, *, abrupt: bool) -> None:
    _coordinators[:] = [coordinator for coordinator in _coordinators if coordinator.alive]
    _request.use(None)
    ended.client.close(abrupt=abrupt)
    if ended.coordinator is not None:
        _coordinators.append(ended.coordinator)
    ended.trace.stop()


@atexit.register
def _at_exit() -> None:
    """The other ranks may have things to do without this one; what they ask of it fails at once."""
    failed = getattr(sys, "last_value", None) is not None
    for coordinator in _coordinators:
        coordinator.stop() if failed else coordinator.join()
