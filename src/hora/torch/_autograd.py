"""Gradients of collectives.

The gradient of an operation is its transpose, as if the ranks' losses were added up: that of ``allgather``
sums the ranks' gradients and takes this rank's rows, that of ``broadcast`` sums them on the root, that of
``alltoall`` sends them back, that of ``reducescatter`` gathers them, and an ``allreduce`` by ``Sum`` or
``Average`` is its own transpose. ``DistributedOptimizer`` then averages, so that parameters get the
gradient of the mean loss.

Horovod averages where ``allgather`` and ``broadcast`` sum, and for ``reducescatter`` multiplies by the
number of ranks; a dispatcher with ``as_horovod`` gets that.
"""

from __future__ import annotations

from typing import Any

import torch

from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError
from hora.torch import _context
from hora.torch._process_sets import ProcessSet
from hora.torch._request import Request, dispatcher

__all__ = ["run"]


def run(request: Request) -> Any:
    """Submit the request and wait; the result has a gradient if a tensor of the request wants one."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in request.tensors):
        return dispatcher().submit(request).wait()
    results: Any = _Differentiable.apply(request, *request.tensors)  # type: ignore[no-untyped-call]
    if request.kind is Kind.ALLTOALL:
        return results
    return list(results) if request.grouped else results[0]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, *tensors: torch.Tensor) -> Any:
        result = dispatcher().submit(request).wait()
        ctx.kind, ctx.op, ctx.root, ctx.process_set = (
            request.kind,
            request.op,
            request.root,
            request.process_set,
        )
        ctx.factors = request.prescale, request.postscale
        ctx.grouped = request.grouped
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.rows = request.rows
        if request.kind is Kind.ALLTOALL:
            output, received = result
            ctx.received = received
            ctx.mark_non_differentiable(received)
            return output, received
        results = tuple(result) if request.grouped else (result,)
        if _needs_values(request.kind, request.op):
            ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *_BACKWARD[ctx.kind](ctx, list(gradients))


def _allreduce(ctx: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    if ctx.op is ReduceOp.Product and not dispatcher().as_horovod:
        raise CollectiveError(
            "An allreduce by Product has no gradient.", fix="Gather the factors: hora.allgather(x).prod(0)."
        )
    if not _needs_values(ctx.kind, ctx.op):
        prescale, postscale = ctx.factors
        return _reduced(ctx, gradients, ctx.op, prescale=prescale, postscale=postscale)
    # Max and Min: to the ranks that hold the extreme value, in equal parts where several do.
    count = len(gradients)
    tensors, results = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
    prescale, postscale = ctx.factors
    holds = [
        (_widened(tensor) * prescale * postscale).to(result.dtype).eq(result).to(gradient.dtype)
        for tensor, result, gradient in zip(tensors, results, gradients, strict=True)
    ]
    holders = _reduced(ctx, holds, ReduceOp.Sum)
    totals = _reduced(ctx, gradients, ReduceOp.Sum, prescale=prescale, postscale=postscale)
    return [
        total * held / count.clamp(min=1) for total, held, count in zip(totals, holds, holders, strict=True)
    ]


def _allgather(ctx: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    rows = ctx.rows
    if rows is None:
        mine = torch.tensor([[shape[0] if shape else 1 for shape in ctx.shapes]])
        rows = run(Request(kind=Kind.ALLGATHER, tensors=[mine], process_set=ctx.process_set)).t().tolist()
    totals = _reduced(ctx, gradients, _sum_or_mean())
    me = _place(ctx.process_set)
    return [
        total.narrow(0, sum(counts[:me]), counts[me]).reshape(shape)
        for total, counts, shape in zip(totals, rows, ctx.shapes, strict=True)
    ]


def _broadcast(ctx: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    totals = _reduced(ctx, gradients, _sum_or_mean())
    if _context.rank() == ctx.root:
        return totals
    return [torch.zeros_like(total) for total in totals]


def _alltoall(ctx: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    request = Request(
        kind=Kind.ALLTOALL,
        tensors=gradients[:1],
        splits=ctx.received.to(torch.int64),
        process_set=ctx.process_set,
    )
    return [run(request)[0]]


def _reducescatter(ctx: Any, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    if ctx.op not in (ReduceOp.Sum, ReduceOp.Average):
        raise CollectiveError(
            f"A reducescatter by {ctx.op.name} has no gradient.", fix="Write op=hora.Sum or op=hora.Average."
        )
    size = len(ctx.process_set.members)
    prescale, postscale = ctx.factors
    factor = prescale * postscale
    if dispatcher().as_horovod:
        factor *= size if ctx.op is ReduceOp.Sum else 1
    elif ctx.op is ReduceOp.Average:
        factor /= size
    request = Request(
        kind=Kind.ALLGATHER,
        tensors=[gradient * factor if factor != 1 else gradient for gradient in gradients],
        process_set=ctx.process_set,
        grouped=True,
    )
    gathered: list[torch.Tensor] = run(request)
    return gathered


_BACKWARD = {
    Kind.ALLREDUCE: _allreduce,
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
}


def _needs_values(kind: Kind, op: ReduceOp) -> bool:
    return kind is Kind.ALLREDUCE and op in (ReduceOp.Min, ReduceOp.Max) and not dispatcher().as_horovod


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """In the dtype in which it was reduced, so that scaling gives the same bits."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _reduced(
    ctx: Any, tensors: list[torch.Tensor], op: ReduceOp, *, prescale: float = 1.0, postscale: float = 1.0
) -> list[torch.Tensor]:
    request = Request(
        kind=Kind.ALLREDUCE,
        tensors=tensors,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=ctx.process_set,
        grouped=ctx.grouped,
    )
    result: Any = run(request)
    return result if ctx.grouped else [result]


def _sum_or_mean() -> ReduceOp:
    return ReduceOp.Average if dispatcher().as_horovod else ReduceOp.Sum


def _place(process_set: ProcessSet) -> int:
    return process_set.members.index(_context.rank())
