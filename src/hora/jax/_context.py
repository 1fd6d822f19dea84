"""The one context of this worker: who it is, where it computes, and what it writes.

``init()`` makes it, ``shutdown()`` ends it, and every other function asks :func:`required` for it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from hora.adapter import context as adapter
from hora.adapter.agreement import agree
from hora.adapter.context import caller, join, leave
from hora.adapter.current import Current
from hora.adapter.guard import Guard, Members, Shaped
from hora.adapter.ops import Kind, refuse_presentation
from hora.core.settings import Settings
from hora.core.world import World
from hora.jax import _runtime
from hora.jax._mesh import Places
from hora.jax._training import Steps
from hora.jax._watcher import Watcher

__all__ = [
    "Context",
    "context",
    "cross_rank",
    "cross_size",
    "current",
    "device",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "required",
    "shutdown",
    "size",
]


class _Guard(Guard):
    """The guard, with what JAX raises when a connection is lost: either of two, as it happens."""

    failures = (*Guard.failures, ValueError)


@dataclass(eq=False, kw_only=True)
class Context(adapter.Context):
    """What one ``init()`` decided.

    Attributes:
        device: where this worker computes.
        watcher: waits for the results of steps, for the guard; None without one.
        meshes: of process sets, by id.
        steps: what is watched of each compiled step.
        seen: what the ranks have agreed on once, beside collectives.
    """

    watcher: Watcher | None = None
    meshes: dict[int, Places] = field(default_factory=dict)
    steps: weakref.WeakKeyDictionary[Any, Steps] = field(default_factory=weakref.WeakKeyDictionary)
    seen: set[Any] = field(default_factory=set)

    @property
    def device(self) -> jax.Device:
        """Where this worker computes."""
        return self.everywhere.device

    @property
    def everywhere(self) -> Places:
        """The mesh of all ranks."""
        return self.meshes[0]

    def places(self, process_set: Members) -> Places:
        """The mesh of a process set."""
        number = process_set.process_set_id or 0
        if number not in self.meshes:
            self.meshes[number] = Places(process_set.members, self.device)
        return self.meshes[number]

    @contextlib.contextmanager
    def collective(
        self,
        what: Kind | str,
        arrays: Sequence[Shaped],
        process_set: Members,
        *,
        name: str | None = None,
        **details: Any,
    ) -> Iterator[None]:
        """Run a collective in the block, once the ranks agree on it; in the timeline, too."""
        refuse_presentation()
        kind = what.value if isinstance(what, Kind) else what
        shown = {"name": name} if name else {}
        with self.timeline.span(kind, lane="collectives", **shown):
            place = agree(self, kind, name, arrays, process_set, **details)
            with self.waiting(place):
                yield


current: Current[Context] = Current("hora.jax")
required = current.required
is_initialized = current.is_initialized
rank, size = current.rank, current.size
local_rank, local_size = current.local_rank, current.local_size
cross_rank, cross_size = current.cross_rank, current.cross_size
is_homogeneous = current.is_homogeneous


def init(
    world: World | None = None,
    *,
    settings: Settings | None = None,
    process_sets: Sequence[Any] = (),
) -> None:
    """Join the job: find the other workers, connect JAX with theirs, and agree on who is who.

    Call it once, before anything that computes with JAX: ``import hora.jax as hora; hora.init()``. Started by
    plain ``python`` there is one worker, and the same script runs unchanged. A script that has called
    ``jax.distributed.initialize`` itself keeps that connection.

    Args:
        world: this worker's place, when the launcher's variables do not say (see ``hora.core.world``).
        settings: overrides the ``HORA_*`` variables.
        process_sets: process sets, or sequences of ranks, to add at once, the same on every rank; more can be
            added at any time.

    Raises:
        AlreadyInitializedError: a second call without :func:`shutdown` in between, or JAX was used before.
        WorldError: launch variables that are partial or contradictory, or ranks that do not come within
            ``HORA_TIMEOUT`` seconds.
        RunDirectoryError: the run directory cannot be used.
    """
    from hora.jax._process_sets import add_process_set, global_process_set  # they build on this module

    made = join(
        current,
        Context,
        everyone=global_process_set,
        where=caller(1),
        world=world,
        settings=settings,
        guard=_Guard,
        start=_start,
        frameworks={"jax": jax.__version__},
        leave_at_exit=_at_exit,
    )
    if made.guard is not None and made.watch is not None and made.world.size > 1:
        made.watcher = Watcher(made.guard, made.watch, lambda: made.timeline)
        made.closing.append(made.watcher.close)
    for process_set in process_sets:
        add_process_set(process_set)


def shutdown() -> None:
    """Leave the job: write the last events. Without ``init()`` it does nothing.

    Every worker calls it at the same place, or none does: it also happens when the interpreter ends. Arrays
    stay usable, and ``init()`` may be called again: JAX's processes stay connected to the end.
    """
    if current.context is not None:
        # Rank 0 serves JAX's processes, too: they end when it does.
        leave(current, patience=current.context.settings.timeout)


def context() -> Context:
    """The context that ``init()`` made.

    Raises:
        NotInitializedError: before ``init()`` or after ``shutdown()``.
    """
    return required("context")


def device() -> jax.Device:
    """Where this worker computes: its own GPU when there is one, else the CPU."""
    return required("device").device


def _start(context: Context) -> None:
    _runtime.choose_device(context.settings)
    if context.world.size > 1:
        _runtime.start(context)
    place = _runtime.device_of(context.world)
    context.meshes[0] = Places(range(context.world.size), place)
    context.engines[place.platform] = "gloo" if place.platform == "cpu" else "nccl"


def _at_exit() -> None:
    _runtime.part(shutdown)
