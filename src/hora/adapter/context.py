"""What ``init()`` decides in every adapter, and how a rank joins the job and leaves it.

An adapter that meets through :mod:`hora.core.store` has a context of a subclass of :class:`Context`, and
calls :func:`join` in its ``init()`` and :func:`leave` in its ``shutdown()``. ``hora.torch`` meets through
torch's own store and builds on :class:`Common`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from hora.adapter import guard as guards
from hora.adapter import hosts, meeting
from hora.adapter.current import Current
from hora.adapter.guard import Guard, Members
from hora.adapter.places import run_directory, versions
from hora.adapter.watch import Watch
from hora.core.errors import WorldError
from hora.core.events import Timeline
from hora.core.rundir import RunDirectory
from hora.core.settings import Settings, load
from hora.core.store import RankGone, Store
from hora.core.version import VERSION
from hora.core.world import World, from_environment

__all__ = ["Common", "Context", "caller", "is_failing", "join", "leave", "timeline_of"]

FAREWELL = 30.0
"""Seconds for which a rank that leaves waits for the others: their engines may still fetch from it."""

_NOTHING = contextlib.nullcontext()


@dataclass(eq=False, kw_only=True)
class Common:
    """What the contexts of all adapters hold.

    Attributes:
        world: this worker's place in the job.
        settings: the ``HORA_*`` settings in force.
        timeline: events of this worker; disabled without a run directory.
        run: the run directory; None when nothing is written. Only rank 0 may write metrics to it.
        where: ``file:line`` of the call of ``init``.
        peers: ranks with this worker's local rank, one per host.
        homogeneous: whether every host has the same number of workers.
        guard: what reports to the supervisor; None without one.
        watch: what looks at the training for it; None without one.
        generation: which ``init()`` of this process it is, the same number on all ranks.
        pid: the process that called ``init``; a forked child has another.
        process_sets: the process sets in use by id, without that of all ranks.
        next_process_set: the id of the next one.
        closing: called when the context ends.
    """

    world: World
    settings: Settings
    timeline: Timeline
    run: RunDirectory | None
    where: str
    peers: tuple[int, ...]
    homogeneous: bool = True
    guard: Guard | None = None
    watch: Watch | None = None
    generation: int = 0
    pid: int = field(default_factory=os.getpid)
    process_sets: dict[int, Any] = field(default_factory=dict)
    next_process_set: int = 1
    closing: list[Callable[[], None]] = field(default_factory=list)

    def waiting(
        self, place: tuple[int, int] | None, *, lasting: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """This rank waits in a collective of this place, which starts in the block or before it."""
        return _NOTHING if self.guard is None or place is None else self.guard.waiting(place, lasting=lasting)

    def close_files(self) -> None:
        """Do what is to be done at the end, and write the last events."""
        for close in list(self.closing):
            close()
        self.timeline.mark("shutdown")
        self.timeline.close()


@dataclass(eq=False, kw_only=True)
class Context(Common):
    """The context of an adapter that meets through the store.

    Attributes:
        module: the adapter: ``hora.jax``.
        store: bytes between the ranks.
        everyone: the process set of all ranks.
        engines: device type -> engine, for ``run.json``; the adapter fills it in when its engine starts.
        frameworks: name -> version, for ``run.json``.
        agreed: see :mod:`hora.adapter.agreement`.
    """

    module: str
    store: Store
    everyone: Members
    engines: dict[str, str] = field(default_factory=dict)
    frameworks: dict[str, str] = field(default_factory=dict)
    agreed: dict[Any, int] = field(default_factory=dict)

    def key(self, what: str) -> str:
        """A key of the store that belongs to this ``init()``."""
        return f"{what} (init {self.generation})"

    def exchange(
        self, what: str, value: bytes, *, process_set: Members | None = None, timeout: float | None = None
    ) -> list[bytes]:
        """The values of all members of a process set, in the order of ranks; see :meth:`Store.exchange`.

        It is not reported to the guard: do that around it, by :func:`hora.adapter.guard.collective`.
        """
        # While this rank leaves, the set of all ranks does not know them any more.
        members = range(self.world.size) if process_set is None else process_set.members
        number = 0 if process_set is None else process_set.process_set_id or 0
        return self.store.exchange(
            self.key(f"{what} in process set {number}" if number else what),
            value,
            index=members.index(self.world.rank),
            count=len(members),
            members=members,
            timeout=timeout,
        )


C = TypeVar("C", bound=Context)


def join(
    current: Current[C],
    kind: type[C],
    *,
    everyone: Members,
    where: str,
    world: World | None = None,
    settings: Settings | None = None,
    guard: type[Guard] = Guard,
    start: Callable[[C], None] | None = None,
    frameworks: Mapping[str, str] | None = None,
    leave_at_exit: Callable[[], None],
) -> C:
    """Join the job: find the other workers, agree on who is who, start the framework's engine.

    Args:
        current: where the adapter keeps its context.
        kind: the adapter's class of context; fields of its own need defaults.
        everyone: the adapter's process set of all ranks.
        where: :func:`caller` of ``init``.
        world: this worker's place, when the launcher's variables do not say.
        settings: overrides the ``HORA_*`` variables.
        guard: the adapter's class of guard. What ends its engine on an alarm, :meth:`start` adds to
            ``context.guard.reporter.on_alarm``.
        start: connects the engine while the ranks meet, with the store to tell each other addresses. What it
            raises ends this.
        frameworks: names and versions of the frameworks, for ``run.json``.
        leave_at_exit: called when the interpreter ends: the adapter's ``shutdown``, as a rule.

    Raises:
        AlreadyInitializedError: there is a context.
        WorldError: launch variables that are partial or contradictory, ranks that do not come within
            ``HORA_TIMEOUT`` seconds, ranks of different frameworks or versions of Hora, an elastic job.
        RunDirectoryError: the run directory cannot be used.
    """
    current.refuse_second()
    settings = load() if settings is None else settings
    if settings.elastic_fd is not None:
        raise WorldError(
            f"{current.module} cannot take part in an elastic job: its engine keeps the ranks that it began "
            "with.",
            fix="Save often and let all workers start anew: `hora run -n 4 --restarts 3 script.py`.",
        )
    world = from_environment() if world is None else world
    run = run_directory(world, settings)
    watch = guards.connect(settings, rank=world.rank, size=world.size, module=current.module, make=guard)
    number = current.generation
    with guards.meeting(watch, world.size, module=current.module):
        store = meeting.meet(world, settings, module=current.module)
        if watch is not None:
            watch.reporter.on_alarm.append(lambda: store.abort("The guard stops the job."))
        world, peers, homogeneous = _introduce(store, world, current.module, number)
        meeting.forget_file(world, settings)
        context = kind(
            world=world,
            settings=settings,
            timeline=timeline_of(run, world, settings),
            run=run,
            where=where,
            peers=peers,
            homogeneous=homogeneous,
            guard=watch,
            watch=None if watch is None else _watch(watch, world, number, current.module),
            generation=number,
            module=current.module,
            store=store,
            everyone=everyone,
            frameworks=dict(frameworks or {}),
        )
        # The adapter's own functions may be what starts its engine.
        current.context = context
        try:
            if start is not None:
                start(context)
            _all_ready(store, world, number)
        except BaseException:
            current.context = None
            raise
    current.generation += 1
    context.timeline.mark("init", host=platform.node())
    if watch is not None:
        # The script may hang, and be killed before it could write them.
        watch.reporter.on_alarm.append(context.timeline.flush)
    if run is not None and world.rank == 0:
        mode = "off" if watch is None else settings.guard
        found = versions(**context.frameworks)
        run.describe(world=asdict(world), versions=found, engines=context.engines, guard=mode)
    _leave_at_exit(current.module, leave_at_exit)
    return context


def leave(
    current: Current[C], *, stop: Callable[[C], None] | None = None, patience: float = FAREWELL
) -> None:
    """Leave the job: wait for the others, end the engine, write the last events.

    Without ``init()`` it does nothing; in a forked child it only forgets the parent's context. When this
    rank is failing, it waits for nobody.

    Args:
        current: where the adapter keeps its context.
        stop: ends the engine.
        patience: seconds for which this rank waits for the others, whose engines may still need it.
    """
    context, current.context = current.context, None
    if context is None or context.pid != os.getpid():
        return
    if context.guard is not None:
        context.guard.leave()
    if not is_failing():
        _farewell(context, patience)
    try:
        if stop is not None:
            stop(context)
    finally:
        context.close_files()
        for process_set in context.process_sets.values():
            process_set.forget()
        context.process_sets.clear()


def caller(depth: int) -> str:
    """``file:line`` of the frame so many above the one that asks."""
    frame = sys._getframe(depth + 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_failing() -> bool:
    """Whether an exception is on its way through this thread, or has ended the script."""
    return sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None


def timeline_of(run: RunDirectory | None, world: World, settings: Settings) -> Timeline:
    """This worker's timeline; disabled without a run directory."""
    lasting = world.rank if settings.worker is None else settings.worker
    path = run.events(lasting) if run is not None and settings.timeline else None
    return Timeline(path, rank=world.rank, limit=settings.timeline_events)


def _watch(guard: Guard, world: World, generation: int, module: str) -> Watch:
    guard.reporter.send({"kind": "module", "name": module})
    return Watch(guard.reporter, rank=world.rank, size=world.size, generation=generation)


def _introduce(store: Store, world: World, module: str, number: int) -> tuple[World, tuple[int, ...], bool]:
    """Tell the others who this is; it is also a barrier."""
    mine = {
        "host": hosts.host_number(world),
        "local rank": world.local_rank,
        "calls": f"{module}.init()",
        "runs": f"Hora {VERSION}",
    }
    told = store.exchange(
        f"init() (init {number})", json.dumps(mine).encode(), index=world.rank, count=world.size
    )
    everyone = [json.loads(text) for text in told]
    for does in ("calls", "runs"):
        odd = next((rank for rank, other in enumerate(everyone) if other[does] != everyone[0][does]), None)
        if odd is not None:
            raise WorldError(
                f"Rank 0 {does} {everyone[0][does]}, and rank {odd} {everyone[odd][does]}.",
                fix="Let all ranks run the same script, with the same version of Hora.",
            )
    return hosts.grouped(world, [(other["host"], other["local rank"]) for other in everyone])


def _all_ready(store: Store, world: World, number: int) -> None:
    """Nobody goes on, or ends and takes the store away, before all engines are connected."""
    store.exchange(f"start of the engine (init {number})", b"", index=world.rank, count=world.size)


def _farewell(context: Context, patience: float) -> None:
    """Wait until all leave. This rank has done its part: what becomes of the others, they say themselves."""
    try:
        context.exchange("shutdown()", b"", timeout=min(patience, context.settings.timeout))
    except RankGone:
        return
    except WorldError as error:
        print(f"hora: rank {context.world.rank} leaves: {error.what}", file=sys.stderr, flush=True)


_at_exit: dict[str, Callable[[], None]] = {}


def _leave_at_exit(module: str, call: Callable[[], None]) -> None:
    """At the interpreter's end; registered after the end of the store and of the engine, so it is first."""
    if module in _at_exit:
        atexit.unregister(_at_exit[module])
    _at_exit[module] = call
    atexit.register(call)
