"""What is asked of the engine, and who hands it over: all collectives come through :func:`run`.

Called eagerly, a request is carried out at once. While a ``tf.function`` is traced it becomes an operation of
the graph that does the same each time it runs: what the graph computed is handed to Python, which the guard
and the negotiation of ``hora run --horovod`` need in any case, and travels from there. TensorFlow keeps such
operations in the order in which they were traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from hora.adapter.frames import Site, at, user_site
from hora.adapter.guard import Spec
from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import HoraError
from hora.guard.source import Block
from hora.tensorflow import _raised
from hora.tensorflow._process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from hora.tensorflow._watch import Steps

__all__ = ["Dispatcher", "Request", "Tensor", "Where", "dispatcher", "run", "use"]

Tensor = Any
"""A ``tf.Tensor``; TensorFlow has no types of its own for a checker."""

Where = tuple[str | None, str | None, tuple[Block, ...]]


@dataclass(eq=False, kw_only=True)
class Request:
    """One collective.

    Attributes:
        kind: which.
        tensors: this rank's.
        name: that the user gave it.
        op: of a reduction.
        prescale: factor before it.
        postscale: factor after it.
        root: rank of the job whose tensors are broadcast.
        splits: rows for each member, for an alltoall; None: even.
        process_set: who takes part.
        grouped: whether the user gave a list.
        narrow: whether half precision is added up as it is, since the user asked for that to travel.
        training: of which it averages a step's gradients; None: none, or nobody watches it.
        names: of the variables that these are gradients of.
        specs: what the user gave, where the tensors are flat buffers made of it.
        rows: by member: first dimensions of the tensors of an allgather, or splits of an alltoall. None: the
            ranks have yet to tell each other.
        site: where the script asks for it, if that was traced.
        where: the same for messages.
    """

    kind: Kind
    tensors: list[Tensor]
    name: str | None = None
    op: ReduceOp = ReduceOp.Sum
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: Tensor = None
    process_set: ProcessSet = global_process_set
    grouped: bool = False
    narrow: bool = False
    training: Steps | None = None
    names: tuple[str, ...] = ()
    specs: tuple[Spec, ...] | None = None
    rows: list[list[int]] | None = None
    site: Site | None = None
    where: Where | None = None

    @property
    def given(self) -> Sequence[Spec]:
        """Dtypes and shapes of what the user gave."""
        if self.specs is not None:
            return self.specs
        return [Spec(tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors]

    @property
    def called(self) -> str:
        """The collective's name."""
        return f"grouped_{self.kind.value}" if self.grouped else self.kind.value

    @property
    def details(self) -> dict[str, Any]:
        """What else must be equal on all ranks."""
        found: dict[str, Any] = {}
        if self.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            found["operation"] = self.op.value
            if (self.prescale, self.postscale) != (1.0, 1.0):
                found["factors"] = (self.prescale, self.postscale)
        elif self.kind is Kind.BROADCAST:
            found["root"] = self.root
        return found


class Dispatcher(Protocol):
    """Carries out requests.

    Attributes:
        as_horovod: whether the operations follow Horovod where it differs from Hora.
    """

    as_horovod: bool

    def run(self, request: Request) -> list[Tensor]:
        """Carry a request out, on eager tensors; its results.

        An allgather has one result more for each tensor: the first of this rank's rows. An alltoall has one
        more: the rows that came from each member.
        """


@dataclass
class _Chosen:
    dispatcher: Dispatcher | None = None
    direct: list[Dispatcher] = field(default_factory=list)


_chosen = _Chosen()


def dispatcher() -> Dispatcher:
    """Whoever carries out requests now."""
    if _chosen.dispatcher is not None:
        return _chosen.dispatcher
    if not _chosen.direct:
        from hora.tensorflow._direct import Direct  # it builds on this module

        _chosen.direct.append(Direct())
    return _chosen.direct[0]


def use(other: Dispatcher | None) -> None:
    """Let another carry them out; None: as without."""
    _chosen.dispatcher = other


def run(request: Request) -> list[Tensor]:
    """Carry a request out, or let the graph that is traced do so; its results as of :class:`Dispatcher`."""
    if tf.executing_eagerly():
        return _carried_out(request)
    joins = request.kind is Kind.ALLREDUCE and request.op is not ReduceOp.Adasum and len(request.tensors) > 1
    if joins and all(tensor.shape.is_fully_defined() for tensor in request.tensors):
        return _traced_as_one(request)
    return _traced(request, site=user_site(1), where=at())


def _carried_out(request: Request) -> list[Tensor]:
    training = request.training
    if training is None:
        return dispatcher().run(request)
    where = None if request.where is None else request.where[0]
    training.before(request.tensors, request.given, request.names, where)
    found = dispatcher().run(request)
    training.after()
    return found


def _traced_as_one(request: Request) -> list[Tensor]:
    """The graph makes one tensor of those of each dtype: to hand over hundreds would take longer."""
    by_dtype: dict[tf.DType, list[int]] = {}
    for place, tensor in enumerate(request.tensors):
        by_dtype.setdefault(tensor.dtype, []).append(place)
    flat = [
        tf.concat([tf.reshape(request.tensors[place], [-1]) for place in places], 0)
        for places in by_dtype.values()
    ]
    joined = replace(request, tensors=flat, specs=tuple(request.given))
    totals = _traced(joined, site=user_site(2), where=at())
    results: list[Tensor] = [None] * len(request.tensors)
    for places, total in zip(by_dtype.values(), totals, strict=True):
        shapes = [request.tensors[place].shape for place in places]
        parts = tf.split(total, [shape.num_elements() for shape in shapes])
        for place, part, shape in zip(places, parts, shapes, strict=True):
            results[place] = tf.reshape(part, shape)
    return results


def _traced(request: Request, *, site: Site | None, where: Where) -> list[Tensor]:
    tensors = list(request.tensors)
    has_splits = request.splits is not None

    def carry_out(*values: Tensor) -> list[Tensor]:
        given = list(values)
        splits = given.pop() if has_splits else None
        try:
            return _carried_out(replace(request, tensors=given, splits=splits, site=site, where=where))
        except HoraError as error:
            _raised.keep(error)
            raise

    inputs = [*tensors, request.splits] if has_splits else tensors
    dtypes = [tensor.dtype for tensor in tensors]
    if request.kind is Kind.BARRIER:
        dtypes = [tf.int32]
    elif request.kind is Kind.ALLGATHER:
        dtypes += [tf.int32] * len(tensors)
    elif request.kind is Kind.ALLTOALL:
        dtypes.append(tf.int32)
    results = list(tf.py_function(carry_out, inputs, dtypes))
    for result, tensor in zip(results, tensors, strict=False):
        rows = request.kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER)
        known = tensor.shape
        if rows and known.rank:
            known = tf.TensorShape([None, *known[1:]])
        result.set_shape(known)
    for result in results[len(tensors) :]:
        result.set_shape([] if request.kind is Kind.ALLGATHER else [None])
    return results
