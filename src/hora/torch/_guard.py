"""This adapter's half of the guard: tells the supervisor which collective a rank is about to run.

Every collective passes through :meth:`Guard.collective` or :meth:`Guard.enter`. Without a supervisor
(plain ``python``, ``torchrun``) or with ``HORA_GUARD=off`` there is no guard, and :func:`collective`
costs one test.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hora.core.errors import HoraError, WorldError
from hora.core.settings import Settings
from hora.guard.call import Call
from hora.guard.reporter import Reporter
from hora.guard.source import Block, blocks, rank_condition
from hora.torch._connections import Connections
from hora.torch._observe import Calls
from hora.torch._request import refuse_presentation
from hora.torch.engines import Group

if TYPE_CHECKING:
    from hora.torch._buckets import Bucket
    from hora.torch._context import Context
    from hora.torch._process_sets import ProcessSet
    from hora.torch._request import Request

__all__ = [
    "Guard",
    "Site",
    "at",
    "collective",
    "connect",
    "disconnect",
    "inside",
    "meeting",
    "user_frame",
    "user_frames",
    "user_site",
]

FRAMES = 12
"""User frames looked at for a condition on the rank."""

_LIBRARIES = tuple(
    str(path) + os.sep
    for path in {
        Path(__file__).resolve().parents[1],
        Path(torch.__file__).resolve().parent,
        Path(os.__file__).resolve().parent,
    }
)
ENGINE_PATIENCE = datetime.timedelta(days=30)
"""After which the engine itself gives a guarded collective up: never in practice. The supervisor applies
``HORA_TIMEOUT``, with a reason, and not while a missing rank is declared to be busy alone."""

Site = tuple[str, int, int]
"""A place in the script: its file, the first line of the function, and the instruction. A line's number would
have to be looked for, and the hash of a code object is that of all its constants."""

_user_files: dict[str, bool] = {}
_reporter: Reporter | None = None
_inside = threading.local()


class Guard:
    """What :mod:`hora.torch` reports through.

    Attributes:
        reporter: the link to the supervisor.
        connections: the engine's connections, closed when the job must stop.
        site: where the script has called the backward pass that is under way, if there is one.
        timeout: after which the engine gives up what it was not started with under the guard.

    Args:
        timeout: the setting ``HORA_TIMEOUT`` in seconds.
    """

    def __init__(self, reporter: Reporter, connections: Connections, *, timeout: float) -> None:
        self.reporter = reporter
        self.connections = connections
        self.timeout = datetime.timedelta(seconds=timeout)
        self.site: Site | None = None
        self._engines: dict[int, Any] = {}

    def add_group(self, set_id: int, group: dist.ProcessGroup) -> None:
        """Take over the timeout of a process set's collectives."""
        if isinstance(group, Group):
            self._engines[set_id] = group.gloo
            group.team.timeout = ENGINE_PATIENCE.total_seconds()  # the supervisor sees all its waits
            group.queue.observer = Calls(self, set_id, group.team.members)
            self.connections.groups.append(weakref.ref(group))
        elif "cpu" in dist.get_backend_config(group) and dist.get_world_size(group) > 1:
            self._engines[set_id] = group._get_backend(torch.device("cpu"))

    def leave(self) -> None:
        """The job ends for this rank."""
        self._engines.clear()
        self.reporter.absent()

    def enter(
        self,
        name: str,
        tensors: Sequence[torch.Tensor] = (),
        *,
        process_set: ProcessSet,
        label: str | None = None,
        site: Site | None = None,
        **details: Any,
    ) -> tuple[int, int]:
        """Note a collective that is about to start; returns its place, for :meth:`waiting`.

        Args:
            name: which collective.
            tensors: those that all ranks must give alike.
            process_set: who takes part.
            label: the name that the user gave it.
            site: where the script calls it, if that is known.
            details: what else must be equal: ``operation``, ``root``, ``factors``.

        Raises:
            VerdictError: the ranks do not call the same; or the job is to stop for another reason.
        """
        set_id = process_set.process_set_id or 0
        # An allgather's rows may differ, and what alltoall splits.
        rows = name in ("allgather", "grouped_allgather", "alltoall")
        shapes = tuple([(tensor.dtype, tensor.shape[1:] if rows else tensor.shape) for tensor in tensors])
        key = (name, label, set_id, site or user_site(2), shapes, *details.values())
        describe = functools.partial(
            _describe, name, shapes, label=label, process_set=process_set, details=details
        )
        return self.reporter.enter(key, describe, set_id=set_id, members=process_set.members)

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
        ours = bucket.payload.is_cpu and (process_set.process_set_id or 0) in self._engines
        return ENGINE_PATIENCE if ours else None

    def parted(self, error: HoraError) -> None:
        """The ranks' gradients of different steps have met; every rank raises the error."""
        where = at()[0]
        self.reporter.send({"kind": "parted", "text": error.what, "advice": error.fix, "where": where})

    def waiting(self, place: tuple[int, int], *, lasting: bool = True) -> Waiting:
        """This rank waits in a collective while the block runs; an engine's error becomes its cause.

        Args:
            place: of the collective.
            lasting: whether the engine must be told to wait longer than otherwise for what the block starts.
        """
        return Waiting(self, place, self._engines.get(place[0]) if lasting else None)

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


class Waiting:
    """A block in which a rank waits: a plain object, as every step enters several, with cold caches."""

    __slots__ = ("_began", "_engine", "_guard", "_place")

    def __init__(self, guard: Guard, place: tuple[int, int], engine: Any) -> None:
        self._guard = guard
        self._place = place
        self._engine = engine
        self._began = 0.0

    def __enter__(self) -> None:
        if self._engine is not None:
            self._engine._set_default_timeout(ENGINE_PATIENCE)  # of what is started inside
        _inside.depth = getattr(_inside, "depth", 0) + 1
        self._began = self._guard.reporter.wait_begins(self._place)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        reporter = self._guard.reporter
        _inside.depth -= 1
        try:
            if isinstance(error, RuntimeError):
                cause = reporter.explain(error)
                if cause is not error:
                    raise cause from error
        finally:
            reporter.wait_ends(self._place, self._began)
            if self._engine is not None:
                self._engine._set_default_timeout(self._guard.timeout)


@contextlib.contextmanager
def collective(
    context: Context,
    name: str,
    tensors: Sequence[torch.Tensor] = (),
    *,
    process_set: ProcessSet | None = None,
    **details: Any,
) -> Iterator[None]:
    """Run a collective of several messages under the guard; those inside are part of it."""
    refuse_presentation()
    guard = context.guard
    if guard is None or inside():
        yield
        return
    if process_set is None:
        from hora.torch._process_sets import global_process_set  # it builds on _context, which builds on this

        process_set = global_process_set
    place = guard.enter(name, tensors, process_set=process_set, **details)
    with guard.waiting(place):
        yield


def inside() -> bool:
    """Whether this thread is inside one of Hora's own collectives."""
    return bool(getattr(_inside, "depth", 0))


def connect(settings: Settings, *, rank: int, size: int) -> Guard | None:
    """The guard, when the launcher left a link to the supervisor."""
    global _reporter
    if settings.guard == "off" or settings.guard_fd is None or settings.guard_board is None:
        return None
    if _reporter is None:
        try:
            strict = settings.guard == "strict"
            _reporter = Reporter(settings.guard_fd, settings.guard_board, rank=rank, size=size, strict=strict)
        except ValueError as error:
            raise WorldError(
                f"What `hora run` opened for the guard is not there any more ({error}): the script has "
                "closed or replaced descriptors that it had not opened, or has started itself anew (exec).",
                fix="Call hora.torch.init() before that; to set variables, write `hora run --env K=V` "
                "instead of an exec.",
            ) from error
    if not _reporter.active:
        return None
    guard = Guard(_reporter, Connections(), timeout=settings.timeout)
    _reporter.on_alarm[:] = [guard.connections.close]
    return guard


def disconnect() -> None:
    """Hang up: the next ``init()`` gets another link to the supervisor."""
    global _reporter
    if _reporter is not None:
        _reporter.close()
        _reporter = None


@contextlib.contextmanager
def meeting(guard: Guard | None, size: int) -> Iterator[None]:
    """The ranks meet while the block runs: the first collective of each ``init()``."""
    if guard is None:
        yield
        return
    place = guard.reporter.enter(
        ("init", user_site(4)),
        lambda: Call({"collective": "init"}, "hora.torch.init()", *at()),
        set_id=0,
        members=range(size),
        check=False,
    )
    with guard.waiting(place), guard.connections.made():
        yield
    guard.reporter.running()


def user_frames(limit: int = FRAMES) -> list[tuple[str, int]]:
    """File and line of the user's frames, innermost first."""
    frames: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < limit:
        if _is_user(frame.f_code):
            frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frames


def at() -> tuple[str | None, str | None, tuple[Block, ...]]:
    """The user's line, the condition on the rank under which it stands, and the blocks that it is in."""
    frames = user_frames()
    if not frames:
        return None, None, ()
    return f"{frames[0][0]}:{frames[0][1]}", rank_condition(frames), blocks(*frames[0])


def user_site(depth: int) -> Site | None:
    """The user's innermost place among the frames from this depth on, cheaper than its line."""
    frame = user_frame(depth + 1)
    return None if frame is None else (frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti)


def user_frame(depth: int) -> FrameType | None:
    """The user's innermost frame among those from this depth on."""
    frame: FrameType | None = sys._getframe(depth)
    known = _user_files
    while frame is not None:
        file = frame.f_code.co_filename
        if known[file] if file in known else _is_user(frame.f_code):
            return frame
        frame = frame.f_back
    return None


def _is_user(code: CodeType) -> bool:
    file = code.co_filename
    known = _user_files.get(file)
    if known is None:
        known = _user_files[file] = not (file.startswith(("<frozen", *_LIBRARIES)) or "site-packages" in file)
    return known


def _describe(
    name: str,
    shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    *,
    label: str | None,
    process_set: ProcessSet,
    details: dict[str, Any],
) -> Call:
    dtypes = [str(dtype).removeprefix("torch.") for dtype, _ in shapes]
    sizes = [tuple(shape) for _, shape in shapes]
    signature = {
        "collective": name,
        "name": label,
        "dtype": dtypes,
        "shape": [list(size) for size in sizes],
        "process set": list(process_set.members) if process_set.process_set_id else "all ranks",
        **{key: list(value) if isinstance(value, tuple) else value for key, value in details.items()},
    }
    words = [name]
    if label:
        words.append(repr(label))
    words += [f"{dtype} {size}" for dtype, size in list(zip(dtypes, sizes, strict=True))[:3]]
    if len(sizes) > 3:
        words.append(f"and {len(sizes) - 3} more tensors")
    words += [
        f"{'root ' if key == 'root' else ''}{value}" for key, value in details.items() if key != "items"
    ]
    if process_set.process_set_id:
        words.append(f"among ranks {process_set.members}")
    return Call(signature, " ".join(words), *at())
