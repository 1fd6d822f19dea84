"""Requests carried out in the order of the script, which is that of all ranks."""

from __future__ import annotations

from typing import Any

from hora.adapter.agreement import agree
from hora.adapter.guard import Place, describe, in_words
from hora.adapter.ops import Kind, refuse_presentation
from hora.guard.call import Call
from hora.tensorflow._context import Context, required
from hora.tensorflow._execute import counts, exchange_rows, execute
from hora.tensorflow._process_sets import group_of
from hora.tensorflow._request import Request, Tensor

__all__ = ["Direct"]


class Direct:
    """What all ranks ask for is compared when it is asked for the first time, and trusted afterwards."""

    as_horovod = False

    def run(self, request: Request) -> list[Tensor]:
        """Carry a request out; see :class:`hora.tensorflow._request.Dispatcher`."""
        context = required(request.called)
        refuse_presentation()
        named = {"name": request.name} if request.name else {}
        with context.timeline.span(request.called, lane="collectives", **named):
            place = _agree(request, context)
            group = group_of(request.process_set)
            with context.waiting(place, lasting=False), context.engine.turn():
                if request.kind in (Kind.ALLGATHER, Kind.ALLTOALL):
                    request.rows = exchange_rows(counts(request, group), context.engine, group)
                found = execute(request, context.engine, group)
        return found


def _agree(request: Request, context: Context) -> Place | None:
    if request.where is None or context.guard is None:
        return agree(
            context, request.called, request.name, request.given, request.process_set, **request.details
        )
    # The graph was traced at that place; there is no frame of the script's on this thread's stack.
    where, process_set = request.where, request.process_set
    rows = request.kind in (Kind.ALLGATHER, Kind.ALLTOALL)
    shapes = tuple([(dtype, shape[1:] if rows else shape) for dtype, shape in request.given])
    details: dict[str, Any] = request.details
    number = process_set.process_set_id or 0

    def told() -> Call:
        signature = describe(
            request.called, shapes, label=request.name, process_set=process_set, details=details
        )
        return Call(signature, in_words(signature, details, process_set), *where)

    return context.guard.reporter.enter(
        (request.called, request.name, number, request.site, shapes, *details.values()),
        told,
        set_id=number,
        members=process_set.members,
    )
