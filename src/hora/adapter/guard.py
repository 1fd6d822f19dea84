"""An adapter's half of the guard: tells the supervisor which collective a rank is about to run.

Every collective that Python starts passes through :func:`collective` or :meth:`Guard.enter`. Without a
supervisor (plain ``python``, ``torchrun``) or with ``HORA_GUARD=off`` there is no guard, and
:func:`collective` costs one test. What a framework does when the job must stop, it adds to
``guard.reporter.on_alarm``; where its engine cannot be made to raise, the supervisor ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from hora.adapter.frames import Site, at, user_site
from hora.adapter.ops import refuse_presentation
from hora.core.errors import WorldError
from hora.core.settings import Settings
from hora.guard.call import Call
from hora.guard.reporter import Reporter

__all__ = [
    "Guard",
    "Guarded",
    "Members",
    "Patient",
    "Place",
    "Shaped",
    "Spec",
    "Waiting",
    "collective",
    "connect",
    "disconnect",
    "inside",
    "meeting",
]

Place = tuple[int, int]
"""Of a collective: its process set, and its number in that set's sequence."""

_reporter: Reporter | None = None
_inside = threading.local()


class Shaped(Protocol):
    """A tensor of any framework, or a :class:`Spec`: what ranks must give alike."""

    @property
    def dtype(self) -> Any:
        """Hashable, with a name."""

    @property
    def shape(self) -> Any:
        """Hashable, a sequence of whole numbers."""


class Spec(NamedTuple):
    """Dtype and shape of a tensor that is not there, or whose own are dear to ask for."""

    dtype: Any
    shape: tuple[int, ...]


class Members(Protocol):
    """A process set, as the guard sees it."""

    process_set_id: int | None

    @property
    def members(self) -> list[int]:
        """Its ranks, ascending."""


class Patient(Protocol):
    """An engine that must be told to wait longer for what is started under the guard."""

    def hold(self) -> None:
        """Wait as long as the supervisor lets it."""

    def release(self) -> None:
        """Wait as long as otherwise."""


class Guard:
    """What an adapter reports through.

    Attributes:
        reporter: the link to the supervisor.
        site: where the script has called the backward pass that is under way, if there is one.
        failures: what the framework's engine raises when a connection is lost or closed; the verdict that
            is why, if there is one, is raised in its place.
        patient: by process set: its engine, if that gives up by itself.
    """

    failures: ClassVar[tuple[type[BaseException], ...]] = (RuntimeError, WorldError)

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.site: Site | None = None
        self.patient: dict[int, Patient] = {}

    def leave(self) -> None:
        """The job ends for this rank."""
        self.patient.clear()
        self.reporter.absent()

    def enter(
        self,
        name: str,
        tensors: Sequence[Shaped] = (),
        *,
        process_set: Members,
        label: str | None = None,
        site: Site | None = None,
        **details: Any,
    ) -> Place:
        """Note a collective that is about to start; returns its place, for :meth:`waiting`.

        A call of a new kind is compared with the other ranks' before this returns.

        Args:
            name: which collective.
            tensors: those that all ranks must give alike, or their :class:`Spec`.
            process_set: who takes part.
            label: the name that the user gave it.
            site: where the script calls it, if that is known.
            details: what else must be equal: ``operation``, ``root``, ``factors``, ``items``; hashable.

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

    def waiting(self, place: Place, *, lasting: bool = True) -> Waiting:
        """This rank waits in a collective while the block runs; an engine's error becomes its cause.

        Args:
            place: of the collective.
            lasting: whether the engine must be told to wait longer than otherwise for what the block starts.
        """
        return Waiting(self, place, self.patient.get(place[0]) if lasting else None)


class Waiting:
    """A block in which a rank waits: a plain object, as every step enters several, with cold caches."""

    __slots__ = ("_began", "_engine", "_guard", "_place")

    def __init__(self, guard: Guard, place: Place, engine: Patient | None) -> None:
        self._guard = guard
        self._place = place
        self._engine = engine
        self._began = 0.0

    def __enter__(self) -> None:
        if self._engine is not None:
            self._engine.hold()
        _inside.depth = getattr(_inside, "depth", 0) + 1
        self._began = self._guard.reporter.wait_begins(self._place)

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        reporter = self._guard.reporter
        _inside.depth -= 1
        try:
            if error is not None and isinstance(error, self._guard.failures):
                cause = reporter.explain(error)
                if cause is not error:
                    raise cause from error
        finally:
            reporter.wait_ends(self._place, self._began)
            if self._engine is not None:
                self._engine.release()


class Guarded(Protocol):
    """A context, as :func:`collective` needs it."""

    @property
    def guard(self) -> Guard | None:
        """What reports to the supervisor; None without one."""

    @property
    def everyone(self) -> Members:
        """The process set of all ranks."""


@contextlib.contextmanager
def collective(
    context: Guarded,
    name: str,
    tensors: Sequence[Shaped] = (),
    *,
    process_set: Members | None = None,
    **details: Any,
) -> Iterator[None]:
    """Run a collective of several messages under the guard; those inside are part of it."""
    refuse_presentation()
    guard = context.guard
    if guard is None or inside():
        yield
        return
    members = context.everyone if process_set is None else process_set
    place = guard.enter(name, tensors, process_set=members, **details)
    with guard.waiting(place):
        yield


def inside() -> bool:
    """Whether this thread is inside one of Hora's own collectives."""
    return bool(getattr(_inside, "depth", 0))


G = TypeVar("G", bound=Guard)


def connect(
    settings: Settings, *, rank: int, size: int, module: str, make: Callable[[Reporter], G]
) -> G | None:
    """The guard, when the launcher left a link to the supervisor.

    Args:
        settings: those in force.
        rank: this rank.
        size: number of ranks.
        module: the adapter, for messages: ``hora.torch``.
        make: the adapter's kind of guard. What it added to the reporter's ``on_alarm`` before is gone.

    Raises:
        WorldError: what the launcher had opened has been closed.
    """
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
                fix=f"Call {module}.init() before that; to set variables, write `hora run --env K=V` "
                "instead of an exec.",
            ) from error
    if not _reporter.active:
        return None
    _reporter.on_alarm.clear()
    return make(_reporter)


def disconnect() -> None:
    """Hang up: the next ``init()`` gets another link to the supervisor."""
    global _reporter
    if _reporter is not None:
        _reporter.close()
        _reporter = None


@contextlib.contextmanager
def meeting(guard: Guard | None, size: int, *, module: str) -> Iterator[None]:
    """The ranks meet while the block runs: the first collective of each ``init()``."""
    if guard is None:
        yield
        return
    place = guard.reporter.enter(
        ("init", user_site(4)),
        lambda: Call({"collective": "init"}, f"{module}.init()", *at()),
        set_id=0,
        members=range(size),
        check=False,
    )
    with guard.waiting(place):
        yield
    guard.reporter.running()


def _describe(
    name: str,
    shapes: Sequence[tuple[Any, Sequence[int]]],
    *,
    label: str | None,
    process_set: Members,
    details: dict[str, Any],
) -> Call:
    signature = describe(name, shapes, label=label, process_set=process_set, details=details)
    return Call(signature, in_words(signature, details, process_set), *at())


def describe(
    name: str,
    shapes: Sequence[tuple[Any, Sequence[int]]],
    *,
    label: str | None,
    process_set: Members,
    details: dict[str, Any],
) -> dict[str, Any]:
    """What must be equal on all ranks, by the names of :data:`hora.guard.call.FIELDS`."""
    return {
        "collective": name,
        "name": label,
        "dtype": [dtype_name(dtype) for dtype, _ in shapes],
        "shape": [list(shape) for _, shape in shapes],
        "process set": list(process_set.members) if process_set.process_set_id else "all ranks",
        **{key: list(value) if isinstance(value, tuple) else value for key, value in details.items()},
    }


def in_words(signature: dict[str, Any], details: dict[str, Any], process_set: Members) -> str:
    """A call, for messages."""
    words = [signature["collective"]]
    if signature["name"]:
        words.append(repr(signature["name"]))
    sizes = list(zip(signature["dtype"], signature["shape"], strict=True))
    words += [f"{dtype} {tuple(size)}" for dtype, size in sizes[:3]]
    if len(sizes) > 3:
        words.append(f"and {len(sizes) - 3} more tensors")
    words += [
        f"{'root ' if key == 'root' else ''}{value}" for key, value in details.items() if key != "items"
    ]
    if process_set.process_set_id:
        words.append(f"among ranks {process_set.members}")
    return " ".join(words)


def dtype_name(dtype: Any) -> str:
    """``float32`` for that of PyTorch, TensorFlow, NumPy or JAX."""
    return str(getattr(dtype, "name", None) or dtype).removeprefix("torch.")
