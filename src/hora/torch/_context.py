"""The one context of this worker: who it is, where it computes, and what it writes.

``init()`` makes it, ``shutdown()`` ends it, and every other function asks :func:`context` for it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from hora.core.errors import AlreadyInitializedError, NotInitializedError
from hora.core.events import Timeline
from hora.core.rundir import RunDirectory
from hora.core.settings import Settings, load
from hora.core.world import World
from hora.torch import _guard, _member, _rendezvous
from hora.torch._guard import Guard
from hora.torch._member import Member
from hora.torch._places import device_of, run_directory, versions
from hora.torch._presence import Presence
from hora.torch.engines import Group

if TYPE_CHECKING:
    from hora.torch._process_sets import ProcessSet
    from hora.torch.watch._watch import Watch

__all__ = [
    "Context",
    "context",
    "cross_rank",
    "cross_size",
    "device",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


@dataclass(eq=False, kw_only=True)
class Context:
    """What one ``init()`` decided.

    Attributes:
        world: this worker's place in the job.
        device: where this worker computes.
        settings: the ``HORA_*`` settings in force.
        group: the ``torch.distributed`` group of all workers.
        control: device of the small tensors that Hora itself exchanges (CPU wherever Gloo is there).
        timeline: events of this worker; disabled without a run directory.
        run: the run directory; None when nothing is written. Only rank 0 may write metrics to it.
        where: ``file:line`` of the call of ``init``.
        presence: who has called ``join()``.
        peers: ranks with this worker's local rank, one per host.
        adopted: whether the group was made by the script rather than by ``init``.
        pid: the process that called ``init``; a forked child has another.
        pending: what is in flight and may never end if a rank fails.
        process_sets: the process sets in use by id, without that of all ranks.
        homogeneous: whether every host has the same number of workers.
        closing: called when the context ends.
        guard: what reports to the supervisor; None without one.
        watch: what looks at the training for the guard; None without one.
        member: this worker's part in an elastic job; None in others.
        generation: which group of this job it is, the same number on all ranks.
        weight: of this rank's gradients in an average: samples of its share, relative to an even one.
    """

    world: World
    device: torch.device
    settings: Settings
    group: dist.ProcessGroup
    control: torch.device
    timeline: Timeline
    run: RunDirectory | None
    where: str
    peers: tuple[int, ...]
    presence: Presence
    adopted: bool = False
    pid: int = field(default_factory=os.getpid)
    pending: set[Any] = field(default_factory=set)
    environment: dict[str, str | None] = field(default_factory=dict)
    file: Path | None = None
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    next_process_set: int = 1
    homogeneous: bool = True
    closing: list[Callable[[], None]] = field(default_factory=list)
    guard: Guard | None = None
    watch: Watch | None = None
    member: Member | None = None
    generation: int = 0
    weight: float = 1.0

    def waiting(
        self, place: tuple[int, int] | None, *, lasting: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """This rank waits in a collective of this place, which starts in the block or before it."""
        return _NOTHING if self.guard is None or place is None else self.guard.waiting(place, lasting=lasting)

    @property
    def everyone(self) -> ProcessSet:
        """The process set of all ranks."""
        from hora.torch._process_sets import global_process_set  # it builds on this module

        return global_process_set

    @property
    def devices(self) -> frozenset[str]:
        """Device types that the group's engines take: ``{"cpu"}``, ``{"cpu", "cuda"}`` or ``{"cuda"}``."""
        return frozenset(_rendezvous.engines(self.group))


ECHO_PATIENCE = 0.5
"""Seconds in which the guard may say why a connection is lost, before the store is asked: it may be gone."""

_NOTHING = contextlib.nullcontext()
_current: Context | None = None
_generation = 0


def init(
    world: World | None = None,
    *,
    settings: Settings | None = None,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"] = (),
) -> None:
    """Join the job: find the other workers and agree with them on who is who.

    Call it once, before anything else of ``hora.torch``. Started by plain ``python`` there is one
    worker, and the same script runs unchanged. A ``torch.distributed`` group that the script made
    before is adopted, and left alone by :func:`shutdown`.

    Args:
        world: this worker's place, when the launcher's variables do not say (see ``hora.core.world``).
        settings: overrides the ``HORA_*`` variables.
        process_sets: sets to add at once, the same on every rank. More can be added at any time; the word
            "dynamic", which Horovod wants for that, is accepted.

    Raises:
        AlreadyInitializedError: a second call without :func:`shutdown` in between.
        WorldError: launch variables that are partial or contradictory, ranks that do not come within
            ``HORA_TIMEOUT`` seconds, or an existing group of another rank or size.
        SettingError: ``HORA_DEVICE=cuda`` on a host without a GPU.
        RunDirectoryError: the run directory cannot be used.
    """
    if _current is not None:
        raise AlreadyInitializedError(
            f"hora.torch.init() was called before, at {_current.where}.",
            fix="Call it once at the start of the script, or hora.torch.shutdown() before the next.",
        )
    where = _caller()
    settings = load() if settings is None else settings
    while not _init(world, settings, process_sets, where):
        continue  # a world of an elastic job that broke while its workers met: there is another


def _init(
    world: World | None,
    settings: Settings,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"],
    where: str,
) -> bool:
    global _current, _generation
    adopted = dist.is_initialized()
    member = None if world is not None or adopted else _member.join(settings)
    if member is not None:
        world, settings = member.place, member.settings
    world = _rendezvous.world(world) if adopted else _rendezvous.from_launcher(world)
    device = device_of(world, settings)
    run = run_directory(world, settings)
    guard = _guard.connect(settings, rank=world.rank, size=world.size)
    generation = _generation if member is None else member.number
    try:
        with _guard.meeting(guard, world.size), _member.meeting(member) as made:
            meeting = _rendezvous.meet(world, settings, generation=generation, cuda=device.type == "cuda")
            made.append(meeting.group)
    except Exception:  # whatever a connection that breaks makes of it; what has another cause is raised
        if member is not None and member.is_lost():
            return False
        raise
    _generation += 1
    lasting = world.rank if settings.worker is None else settings.worker
    path = run.events(lasting) if run is not None and settings.timeline else None
    engines = _rendezvous.engines(meeting.group)
    _current = Context(
        world=meeting.world,
        device=device,
        settings=settings,
        group=meeting.group,
        control=torch.device("cpu") if "cpu" in engines else device,
        timeline=Timeline(path, rank=world.rank, limit=settings.timeline_events),
        run=run,
        where=where,
        peers=meeting.peers,
        presence=Presence(
            dist.distributed_c10d._get_default_store(),
            f"hora/presence/{generation}",
            rank=world.rank,
            size=meeting.world.size,
            timeout=settings.timeout,
            patient=engines.get("cpu") in _rendezvous.PATIENT,
            stopped=lambda: guard is not None and guard.reporter.alarmed(ECHO_PATIENCE),
        ),
        adopted=adopted,
        file=meeting.file,
        environment=meeting.environment,
        homogeneous=meeting.homogeneous,
        guard=guard,
        member=member,
        generation=generation,
    )
    _current.timeline.mark("init", host=platform.node())
    if isinstance(meeting.group, Group):
        meeting.group.queue.stalls.after = settings.stall_warning
    if guard is not None:
        from hora.torch.watch import _watch  # it is of no use without a guard, and imports much

        guard.add_group(0, meeting.group)
        # The script may hang, and be killed before it could write them.
        guard.reporter.on_alarm.append(_current.timeline.flush)
        _watch.start(_current)
    if run is not None and world.rank == 0:
        mode = "off" if guard is None else settings.guard
        run.describe(world=asdict(meeting.world), versions=versions(), engines=engines, guard=mode)
    if process_sets != "dynamic":
        from hora.torch._process_sets import add_process_set  # it builds on this module

        for process_set in process_sets:
            add_process_set(process_set)
    for call in after_init:
        call(_current)
    return True


after_init: list[Callable[[Context], None]] = []
"""Called at the end of each ``init()``: what outlives a world of an elastic job joins the next one."""


def shutdown() -> None:
    """Leave the job: write the last events and close the group. Without ``init()`` it does nothing.

    Every worker calls it at the same place, or none does: it also happens when the interpreter ends.
    Afterwards ``init()`` may be called again. In a forked child it only forgets the parent's context.
    """
    global _current
    context, _current = _current, None
    if context is None or context.pid != os.getpid():
        return
    if context.member is not None:
        context.member.break_off()
    if context.guard is not None:
        context.guard.leave()
    _close_files(context)
    for process_set in context.process_sets.values():
        if context.adopted:
            process_set.close()
        process_set.forget()
    context.process_sets.clear()
    if not context.adopted and dist.is_initialized():
        dist.destroy_process_group()
    # Optimizers may outlive the job. With the last reference the group's threads end; left to the end of
    # the interpreter, one of them could touch Python while that is being taken down, which aborts.
    del context.group
    context.pending.clear()
    _rendezvous.restore(context.environment)
    if context.member is not None:
        context.member.leave()


def is_initialized() -> bool:
    """Whether ``init()`` was called and ``shutdown()`` was not."""
    return _current is not None


def context() -> Context:
    """The context that ``init()`` made.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    return required("context")


def required(function: str) -> Context:
    """The context, for ``function``, which is named in the error when there is none."""
    if _current is None:
        raise NotInitializedError(
            f"hora.torch.{function}() was called before hora.torch.init().",
            fix="Call hora.torch.init() once, at the start of the script.",
        )
    return _current


def planned(warmup: int, total: int) -> None:
    """A schedule warms up for so many steps, of so many in all; a run that is too short for it is refused."""
    if _current is not None and _current.watch is not None:
        _current.watch.plan.schedule(warmup, total)


def rank() -> int:
    """This worker's rank: 0 to ``size() - 1``, unique in the job."""
    return required("rank").world.rank


def size() -> int:
    """Number of workers in the job."""
    return required("size").world.size


def local_rank() -> int:
    """This worker's rank on its host: 0 to ``local_size() - 1``."""
    return required("local_rank").world.local_rank


def local_size() -> int:
    """Number of workers on this worker's host."""
    return required("local_size").world.local_size


def cross_rank() -> int:
    """This worker's rank among the workers that have the same local rank on other hosts."""
    context = required("cross_rank")
    return context.peers.index(context.world.rank)


def cross_size() -> int:
    """Number of hosts that have a worker of this local rank."""
    return len(required("cross_size").peers)


def is_homogeneous() -> bool:
    """Whether every host has the same number of workers."""
    return required("is_homogeneous").homogeneous


def device() -> torch.device:
    """Where this worker computes: its own GPU when there is one, else the CPU."""
    return required("device").device


def _close_files(context: Context) -> None:
    context.presence.depart()
    for close in list(context.closing):
        close()
    context.timeline.mark("shutdown")
    context.timeline.close()


def _caller() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@atexit.register
def _at_exit() -> None:
    """End the run's files; close the group only when no other rank can keep us waiting.

    Closing a Gloo group waits for what is in flight. After a failure a peer may never answer, so the
    group is then kept alive on purpose, by a reference that is never given back: the process ends, its
    sockets close, and the peers notice at once.
    """
    global _current
    context = _current
    if context is None or context.pid != os.getpid():
        return
    if context.pending or getattr(sys, "last_value", None) is not None:
        _current = None
        for held in (context.group, *context.pending):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        if context.file is not None:
            context.file.unlink(missing_ok=True)
        _close_files(context)
    else:
        shutdown()
