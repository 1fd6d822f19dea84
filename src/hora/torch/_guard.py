"""What is torch's own in this adapter's half of the guard: gradients, requests and the engines' patience."""

from __future__ import annotations

import contextlib
import datetime
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hora.adapter import guard as shared
from hora.adapter.frames import at, pass_over
from hora.core.errors import HoraError
from hora.core.settings import Settings
from hora.guard.reporter import Reporter
from hora.torch._connections import Connections
from hora.torch._observe import Calls
from hora.torch.engines import Group

if TYPE_CHECKING:
    from hora.torch._buckets import Bucket
    from hora.torch._process_sets import ProcessSet
    from hora.torch._request import Request

__all__ = ["Guard", "connect", "meeting"]

ENGINE_PATIENCE = datetime.timedelta(days=30)
"""After which the engine itself gives a guarded collective up: never in practice. The supervisor applies
``HORA_TIMEOUT``, with a reason, and not while a missing rank is declared to be busy alone."""

pass_over(str(Path(torch.__file__).resolve().parent) + os.sep)


class Guard(shared.Guard):
    """What :mod:`hora.torch` reports through.

    Attributes:
        connections: the engine's connections, closed when the job must stop.
        timeout: after which the engine gives up what it was not started with under the guard.

    Args:
        timeout: the setting ``HORA_TIMEOUT`` in seconds.
    """

    failures = (RuntimeError,)

    def __init__(self, reporter: Reporter, connections: Connections, *, timeout: float) -> None:
        super().__init__(reporter)
        self.connections = connections
        self.timeout = datetime.timedelta(seconds=timeout)
        reporter.on_alarm.append(connections.close)

    def add_group(self, set_id: int, group: dist.ProcessGroup) -> None:
        """Take over the timeout of a process set's collectives."""
        if isinstance(group, Group):
            self.patient[set_id] = _Engine(group.gloo, self.timeout)
            group.team.timeout = ENGINE_PATIENCE.total_seconds()  # the supervisor sees all its waits
            group.queue.observer = Calls(self, set_id, group.team.members)
            self.connections.groups.append(weakref.ref(group))
        elif "cpu" in dist.get_backend_config(group) and dist.get_world_size(group) > 1:
            self.patient[set_id] = _Engine(group._get_backend(torch.device("cpu")), self.timeout)

    def enter_gradients(self, bucket: Bucket, process_set: ProcessSet) -> tuple[int, int]:
        """:meth:`enter` for a bucket of gradients, in the same backward call as the last time as a rule."""
        if bucket.entered is not None and bucket.entered[0] == self.site:
            place = self.reporter.again(bucket.entered[1], process_set.process_set_id or 0)
            if place is not None:
                return place
        site = self.site
        place = self.enter("average gradients", [bucket.wire], process_set=process_set, site=site)
        bucket.entered = None if site is None else (site, self.reporter.kind)
        return place

    def patience(self, bucket: Bucket, process_set: ProcessSet) -> datetime.timedelta | None:
        """After which the engine gives a bucket up; None: as it does otherwise."""
        ours = bucket.payload.is_cpu and (process_set.process_set_id or 0) in self.patient
        return ENGINE_PATIENCE if ours else None

    def parted(self, error: HoraError) -> None:
        """The ranks' gradients of different steps have met; every rank raises the error."""
        where = at()[0]
        self.reporter.send({"kind": "parted", "text": error.what, "advice": error.fix, "where": where})

    def enter_request(self, request: Request) -> tuple[int, int]:
        """:meth:`enter` for a request."""
        details: dict[str, Any] = {}
        if request.kind.value in ("allreduce", "reducescatter"):
            details["operation"] = request.op.value
            if (request.prescale, request.postscale) != (1.0, 1.0):
                details["factors"] = (request.prescale, request.postscale)
        elif request.kind.value == "broadcast":
            details["root"] = request.root
        return self.enter(
            f"grouped_{request.kind.value}" if request.grouped else request.kind.value,
            request.tensors,
            process_set=request.process_set,
            label=request.name,
            **details,
        )


class _Engine:
    """An engine of torch that gives a collective up by itself."""

    __slots__ = ("_engine", "_timeout")

    def __init__(self, engine: Any, timeout: datetime.timedelta) -> None:
        self._engine = engine
        self._timeout = timeout

    def hold(self) -> None:
        self._engine._set_default_timeout(ENGINE_PATIENCE)  # of what is started from now on

    def release(self) -> None:
        self._engine._set_default_timeout(self._timeout)


def connect(settings: Settings, *, rank: int, size: int) -> Guard | None:
    """The guard, when the launcher left a link to the supervisor."""

    def make(reporter: Reporter) -> Guard:
        return Guard(reporter, Connections(), timeout=settings.timeout)

    return shared.connect(settings, rank=rank, size=size, module="hora.torch", make=make)


@contextlib.contextmanager
def meeting(guard: Guard | None, size: int) -> Iterator[None]:
    """The ranks meet while the block runs: the first collective of each ``init()``."""
    made = contextlib.nullcontext() if guard is None else guard.connections.made()
    with shared.meeting(guard, size, module="hora.torch"), made:
        yield
