"""TensorFlow's part of the negotiation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hora.adapter.negotiation import client
from hora.adapter.negotiation.client import Pending
from hora.adapter.negotiation.errors import HorovodInternalError
from hora.adapter.negotiation.match import Ask, Key
from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError, UsageError
from hora.tensorflow._checks import check_split_values
from hora.tensorflow._context import Context
from hora.tensorflow._execute import counts, execute
from hora.tensorflow._process_sets import global_process_set, group_of
from hora.tensorflow._request import Request, Tensor
from hora.tensorflow.horovod._errors import FailedPreconditionError, InvalidArgumentError, LostError

__all__ = ["Client"]


class Client(client.Client):
    """The dispatcher of the negotiated mode; see :class:`hora.adapter.negotiation.client.Client`.

    Args:
        context: the job.
        connections: control and alarm.
        others: see there.
    """

    def __init__(self, context: Context, *connections: Any, **others: Any) -> None:
        self._job = context
        super().__init__(context, *connections, **others)

    def run(self, request: Request) -> list[Tensor]:
        """Ask for a request, and wait until all ranks have and it has run."""
        set_id = request.process_set.process_set_id
        if set_id is None:
            raise request.process_set.unusable(request.called)
        splits = None
        if request.kind is Kind.ALLTOALL:
            splits = self._splits(request)
        named = {"name": request.name} if request.name else {}
        with self._job.timeline.span(request.called, lane="collectives", **named):
            asked = _describe(request, splits)
            return list(self.ask(request.called, request.name, set_id, request, asked).wait())

    def carry_out(self, works: Sequence[Pending], rows: Sequence[Any]) -> list[Any]:
        """Run the requests, several as one."""
        requests: list[Request] = [work.request for work in works]
        engine = self._job.engine
        group = group_of(requests[0].process_set)
        with engine.turn():
            if len(requests) == 1:
                request = requests[0]
                if request.kind is Kind.ALLGATHER:  # by tensor and member
                    request.rows = [list(of_member) for of_member in zip(*rows[0], strict=True)]
                elif request.kind is Kind.ALLTOALL:
                    request.rows = rows[0]
                return [execute(request, engine, group)]
            joint = replace(
                requests[0], tensors=[tensor for request in requests for tensor in request.tensors]
            )
            results = iter(execute(joint, engine, group))
            return [[next(results) for _ in request.tensors] for request in requests]

    def stand_in(self, key: Key, ask: Ask) -> Request:
        """Zeros."""
        process_set = self._job.process_sets[key[0]] if key[0] else global_process_set
        return Request(
            kind=Kind(ask.kind),
            tensors=[tf.zeros(shape, tf.as_dtype(dtype)) for dtype, shape in ask.tensors],
            op=ReduceOp(ask.op) if ask.op else ReduceOp.Sum,
            prescale=ask.prescale,
            postscale=ask.postscale,
            process_set=process_set,
            grouped=ask.grouped,
            narrow=ask.device.endswith("narrow"),
        )

    def failure(self, text: str) -> HorovodInternalError:
        """TensorFlow's error for what cannot be done as things are."""
        return FailedPreconditionError(text)

    def gone(self, text: str) -> HorovodInternalError:
        """TensorFlow's error for everything else, as of Horovod's operations."""
        return LostError(text)

    def is_lost(self, error: Exception) -> bool:
        """Whether a rank has ended: the engine has no other reason to fail here."""
        return isinstance(error, tf.errors.OpError)

    def _splits(self, request: Request) -> tuple[int, ...]:
        group = group_of(request.process_set)
        tensor = request.tensors[0]
        try:
            if request.splits is not None:
                check_split_values(tensor, request.splits, function="alltoall")
            elif int(tensor.shape[0]) % group.size:
                raise CollectiveError(
                    f"alltoall: {int(tensor.shape[0])} rows do not divide among {group.size} ranks.",
                    fix=f"Give splits=[...], {group.size} numbers of rows.",
                )
        except UsageError as error:
            raise InvalidArgumentError(error.what, fix=error.fix) from error
        return tuple(counts(request, group))


def _describe(request: Request, splits: tuple[int, ...] | None) -> Ask:
    """What the other ranks must agree with."""
    reduces = request.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
    tensors = request.given
    gpu = any("GPU" in tensor.device for tensor in request.tensors)
    return Ask(
        kind=request.kind.value,
        op=request.op.value if reduces else "",
        prescale=request.prescale if reduces else 1.0,
        postscale=request.postscale if reduces else 1.0,
        root=request.root if request.kind is Kind.BROADCAST else 0,
        device=("GPU" if gpu else "CPU") + (" narrow" if request.narrow else ""),
        tensors=tuple((spec.dtype.name, tuple(int(size) for size in spec.shape)) for spec in tensors),
        splits=splits,
        grouped=request.grouped,
    )
