"""The one context of this worker: who it is, where it computes, and what it writes.

``init()`` makes it, ``shutdown()`` ends it, and every other function asks :func:`context` for it.
"""

from __future__ import annotations

import atexit
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

from hora.adapter.context import Common, caller, timeline_of
from hora.adapter.current import Current
from hora.adapter.places import run_directory, versions
from hora.core.settings import Settings, load
from hora.core.world import World
from hora.torch import _guard, _member, _rendezvous
from hora.torch._guard import Guard
from hora.torch._member import Member
from hora.torch._passes import Turn
from hora.torch._places import device_of
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
class Context(Common):
    """What one ``init()`` decided.

    Attributes:
        device: where this worker computes.
        group: the ``torch.distributed`` group of all workers.
        control: device of the small tensors that Hora itself exchanges (CPU wherever Gloo is there).
        presence: who has called ``join()``.
        adopted: whether the group was made by the script rather than by ``init``.
        pending: what is in flight and may never end if a rank fails.
        watch: what looks at the training for the guard; None without one.
        member: this worker's part in an elastic job; None in others.
        turn: what the script computes on now, of what a loader hands out.
    """

    device: torch.device
    group: dist.ProcessGroup
    control: torch.device
    presence: Presence
    adopted: bool = False
    pending: set[Any] = field(default_factory=set)
    environment: dict[str, str | None] = field(default_factory=dict)
    file: Path | None = None
    process_sets: dict[int, ProcessSet] = field(default_factory=dict)
    guard: Guard | None = None
    watch: Watch | None = None
    member: Member | None = None
    turn: Turn = field(default_factory=Turn)

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

current: Current[Context] = Current("hora.torch")

required = current.required
is_initialized = current.is_initialized
rank = current.rank
size = current.size
local_rank = current.local_rank
local_size = current.local_size
cross_rank = current.cross_rank
cross_size = current.cross_size
is_homogeneous = current.is_homogeneous


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
    current.refuse_second()
    where = caller(1)
    settings = load() if settings is None else settings
    while not _init(world, settings, process_sets, where):
        continue  # a world of an elastic job that broke while its workers met: there is another


def _init(
    world: World | None,
    settings: Settings,
    process_sets: Sequence[ProcessSet] | Literal["dynamic"],
    where: str,
) -> bool:
    adopted = dist.is_initialized()
    member = None if world is not None or adopted else _member.join(settings)
    if member is not None:
        world, settings = member.place, member.settings
    world = _rendezvous.world(world) if adopted else _rendezvous.from_launcher(world)
    device = device_of(world, settings)
    run = run_directory(world, settings)
    guard = _guard.connect(settings, rank=world.rank, size=world.size)
    generation = current.generation if member is None else member.number
    try:
        with _guard.meeting(guard, world.size), _member.meeting(member) as made:
            meeting = _rendezvous.meet(world, settings, generation=generation, cuda=device.type == "cuda")
            made.append(meeting.group)
    except Exception:  # whatever a connection that breaks makes of it; what has another cause is raised
        if member is not None and member.is_lost():
            return False
        raise
    current.generation += 1
    engines = _rendezvous.engines(meeting.group)
    current.context = context = Context(
        world=meeting.world,
        device=device,
        settings=settings,
        group=meeting.group,
        control=torch.device("cpu") if "cpu" in engines else device,
        timeline=timeline_of(run, world, settings),
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
    context.timeline.mark("init", host=platform.node())
    if isinstance(meeting.group, Group):
        meeting.group.queue.stalls.after = settings.stall_warning
    if guard is not None:
        from hora.torch.watch import _watch  # it is of no use without a guard, and imports much

        guard.add_group(0, meeting.group)
        # The script may hang, and be killed before it could write them.
        guard.reporter.on_alarm.append(context.timeline.flush)
        _watch.start(context)
    if run is not None and world.rank == 0:
        mode = "off" if guard is None else settings.guard
        run.describe(
            world=asdict(meeting.world),
            versions=versions(torch=torch.__version__),
            engines=engines,
            guard=mode,
        )
    if process_sets != "dynamic":
        from hora.torch._process_sets import add_process_set  # it builds on this module

        for process_set in process_sets:
            add_process_set(process_set)
    for call in after_init:
        call(context)
    return True


after_init: list[Callable[[Context], None]] = []
"""Called at the end of each ``init()``: what outlives a world of an elastic job joins the next one."""


def shutdown() -> None:
    """Leave the job: write the last events and close the group. Without ``init()`` it does nothing.

    Every worker calls it at the same place, or none does: it also happens when the interpreter ends.
    Afterwards ``init()`` may be called again. In a forked child it only forgets the parent's context.
    """
    context, current.context = current.context, None
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


def context() -> Context:
    """The context that ``init()`` made.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    return required("context")


def planned(warmup: int, total: int) -> None:
    """A schedule warms up for so many steps, of so many in all; a run that is too short for it is refused."""
    if current.context is not None and current.context.watch is not None:
        current.context.watch.plan.schedule(warmup, total)


def device() -> torch.device:
    """Where this worker computes: its own GPU when there is one, else the CPU."""
    return required("device").device


def _close_files(context: Context) -> None:
    context.presence.depart()
    context.close_files()


@atexit.register
def _at_exit() -> None:
    """End the run's files; close the group only when no other rank can keep us waiting.

    Closing a Gloo group waits for what is in flight. After a failure a peer may never answer, so the
    group is then kept alive on purpose, by a reference that is never given back: the process ends, its
    sockets close, and the peers notice at once.
    """
    context = current.context
    if context is None or context.pid != os.getpid():
        return
    if context.pending or getattr(sys, "last_value", None) is not None:
        current.context = None
        for held in (context.group, *context.pending):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        if context.file is not None:
            context.file.unlink(missing_ok=True)
        _close_files(context)
    else:
        shutdown()
