"""Gradients of collectives.

The gradient of an operation is its transpose, as if the ranks' losses were added up: that of ``allgather``
sums the ranks' gradients and takes this rank's rows, that of ``broadcast`` sums them on the root, that of
``alltoall`` sends them back, that of ``reducescatter`` gathers them, and an ``allreduce`` by ``Sum`` or
``Average`` is its own transpose. ``DistributedGradientTape`` then averages, so that variables get the
gradient of the mean loss.

Horovod averages where ``allgather`` and ``broadcast`` sum, and for ``reducescatter`` by ``Sum`` multiplies by
the number of ranks; a dispatcher with ``as_horovod`` gets that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError
from hora.tensorflow import _request
from hora.tensorflow._context import current
from hora.tensorflow._request import Request, Tensor, dispatcher

__all__ = ["run"]


def run(request: Request) -> list[Tensor]:
    """Carry a request out; its results have gradients where its tensors can have them."""
    if not any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in request.tensors):
        return _request.run(request)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def differentiable(*tensors: Tensor) -> tuple[list[Tensor], Callable[..., Any]]:
        results = _request.run(replace(request, tensors=list(tensors)))

        def backward(*gradients: Tensor) -> list[Tensor]:
            given = [
                tf.zeros_like(result) if gradient is None else gradient
                for gradient, result, _ in zip(gradients, results, tensors, strict=False)
            ]
            return _BACKWARD[request.kind](request, given, list(tensors), results)

        return results, backward

    found = differentiable(*request.tensors)
    return list(found) if isinstance(found, list | tuple) else [found]


def _allreduce(
    request: Request, gradients: list[Tensor], tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> list[Tensor]:
    if request.op in (ReduceOp.Min, ReduceOp.Max) and not dispatcher().as_horovod:
        return _extremes(request, gradients, tensors, results)
    if request.op is ReduceOp.Product and not dispatcher().as_horovod:
        raise CollectiveError(
            "An allreduce by Product has no gradient.",
            fix="Gather the factors: tf.reduce_prod(hora.allgather(x[None]), 0).",
        )
    return _again(request, gradients, kind=Kind.ALLREDUCE)


def _extremes(
    request: Request, gradients: list[Tensor], tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> list[Tensor]:
    """To the ranks that hold the extreme value, in equal parts where several do."""
    factor = request.prescale * request.postscale
    holds = [
        tf.cast(
            tf.equal(tensor if factor == 1 else tensor * factor, result),
            gradient.dtype,
        )
        for tensor, result, gradient in zip(tensors, results, gradients, strict=True)
    ]
    plain = replace(request, op=ReduceOp.Sum, prescale=1.0, postscale=1.0)
    holders = _again(plain, holds, kind=Kind.ALLREDUCE)
    totals = _again(replace(request, op=ReduceOp.Sum), gradients, kind=Kind.ALLREDUCE)
    return [
        total * held / tf.maximum(count, tf.ones_like(count))
        for total, held, count in zip(totals, holds, holders, strict=True)
    ]


def _allgather(
    request: Request, gradients: list[Tensor], tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> list[Tensor]:
    totals = _again(request, gradients, kind=Kind.ALLREDUCE, op=_sum_or_mean())
    firsts = results[len(tensors) :]
    found = []
    for total, first, tensor in zip(totals, firsts, tensors, strict=True):
        shape = tf.shape(tensor)
        rows = shape[0] if tensor.shape.rank else 1
        found.append(tf.reshape(total[first : first + rows], shape))
    return found


def _broadcast(
    request: Request, gradients: list[Tensor], tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> list[Tensor]:
    totals = _again(request, gradients, kind=Kind.ALLREDUCE, op=_sum_or_mean())
    if current.rank() == request.root:
        return totals
    return [tf.zeros_like(total) for total in totals]


def _alltoall(
    request: Request, gradients: list[Tensor], tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> list[Tensor]:
    back = replace(_plain(request, "grad"), tensors=gradients[:1], splits=results[1])
    return [run(back)[0]]


def _reducescatter(
    request: Request, gradients: list[Tensor], tensors: Sequence[Tensor], results: Sequence[Tensor]
) -> list[Tensor]:
    if request.op not in (ReduceOp.Sum, ReduceOp.Average):
        raise CollectiveError(
            f"A reducescatter by {request.op.name} has no gradient.",
            fix="Write op=hora.Sum or op=hora.Average.",
        )
    size = len(request.process_set.members)
    factor = request.prescale * request.postscale
    if dispatcher().as_horovod:
        factor *= size if request.op is ReduceOp.Sum else 1
    elif request.op is ReduceOp.Average:
        factor /= size
    scaled = [gradient * factor if factor != 1 else gradient for gradient in gradients]
    return run(replace(_plain(request, "grad"), kind=Kind.ALLGATHER, tensors=scaled))[: len(scaled)]


_BACKWARD = {
    Kind.ALLREDUCE: _allreduce,
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
}


def _again(
    request: Request, tensors: list[Tensor], *, kind: Kind, op: ReduceOp | None = None
) -> list[Tensor]:
    plain = _plain(request, "grad")
    again = replace(
        plain,
        kind=kind,
        tensors=tensors,
        op=op or request.op,
        prescale=request.prescale if op is None else 1.0,
        postscale=request.postscale if op is None else 1.0,
        narrow=request.narrow,
    )
    return run(again)[: len(tensors)]


def _plain(request: Request, suffix: str) -> Request:
    """A request like it, for its gradient."""
    return Request(
        kind=request.kind,
        tensors=[],
        name=f"{request.name}.{suffix}" if request.name else None,
        process_set=request.process_set,
        grouped=request.grouped,
    )


def _sum_or_mean() -> ReduceOp:
    return ReduceOp.Average if dispatcher().as_horovod else ReduceOp.Sum
