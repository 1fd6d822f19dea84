"""Carries a request out, now, on the group of its process set.

Each kind has a function that starts the engine's work and returns what is left to do when it has
ended. :func:`execute` waits for it at once; the native dispatcher lets it run.

Arguments were checked before. Everything here may run on another thread than the script's, as long as
the requests of one process set come in one order on all its members.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hora.adapter.guard import inside
from hora.adapter.ops import Kind, ReduceOp
from hora.torch._adasum import adasum
from hora.torch._context import Context, required
from hora.torch._dtypes import reduced_in, scaled_by
from hora.torch._request import Request
from hora.torch._running import Rest, Running
from hora.torch._wire import agree_on_rows, as_bytes, join_bytes, row_bytes, start_gather, wait_for

__all__ = ["Running", "execute", "native", "share_of_rows", "start"]

_ENGINE_OP = {
    ReduceOp.Average: dist.ReduceOp.SUM,  # divided afterwards: Gloo has no average
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}

_FOLD: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.Average: torch.add,
    ReduceOp.Sum: torch.add,
    ReduceOp.Min: torch.minimum,
    ReduceOp.Max: torch.maximum,
    ReduceOp.Product: torch.mul,
}

Started = tuple[list[dist.Work], Rest]


def execute(request: Request) -> Any:
    """Run the request and return its result.

    Returns:
        A tensor; a list of them if ``request.grouped``; None for a barrier; for ALLTOALL a pair of the
        output and the received splits (int32, on the CPU).

    Raises:
        CollectiveError: on every member alike, when first dimensions are told and the rest differs.
        RuntimeError: from the engine, when a member is gone.
    """
    return start(request, negotiated=True).wait()


class _Native:
    """Starts each request when it is submitted, in the order of the calls."""

    as_horovod = False

    def submit(self, request: Request) -> Running:
        kind = request.kind.value
        return start(request, number=required(kind).presence.call(kind, request.process_set))


native = _Native()


def start(request: Request, *, number: int | None = None, negotiated: bool = False) -> Running:
    """Start the engine's work for the request.

    Args:
        request: what to do.
        number: of the operation in its process set, where ``join()`` counts them.
        negotiated: whether the ranks agreed on it already.
    """
    context = required(request.kind.value)
    began = time.time()
    place = None
    if context.guard is not None and not negotiated and not inside():
        place = context.guard.enter_request(request)
    with torch.no_grad(), context.waiting(place):
        works, rest = _START[request.kind](request, context)
    return Running(
        request, works, rest, context, number=number, began=began, place=place, started=time.time() - began
    )


def _start_allreduce(request: Request, context: Context) -> Started:
    size, group = len(request.process_set.members), request.group
    wires = [_wire(tensor, request, index) for index, tensor in enumerate(request.tensors)]
    works: list[dist.Work] = []
    flats: list[tuple[torch.Tensor, list[int]]] = []
    if request.op is ReduceOp.Adasum:
        if size > 1:
            token = torch.zeros(1, dtype=torch.int32, device=wires[0].device)
            wait_for(dist.all_reduce(token, group=group, async_op=True), token, group)  # is everybody there?
        for places in _by_dtype(wires):
            for place, result in zip(places, adasum([wires[place] for place in places], group), strict=True):
                wires[place] = result
    elif size > 1:
        for places in _by_dtype(wires):
            flat = wires[places[0]] if len(places) == 1 else torch.cat([wires[p].reshape(-1) for p in places])
            flats.append((flat, places))
            if flat.numel() > 0:
                is_any = request.tensors[places[0]].dtype is torch.bool and request.op is ReduceOp.Sum
                op = dist.ReduceOp.MAX if is_any else _ENGINE_OP[request.op]  # 0/1 bytes would wrap
                works.append(dist.all_reduce(flat, op, group=group, async_op=True))

    def rest() -> Any:
        for flat, places in flats:
            if len(places) > 1:
                pieces = torch.split(flat, [wires[place].numel() for place in places])
                for place, piece in zip(places, pieces, strict=True):
                    wires[place] = piece.view(wires[place].shape)
        return _results(request, [_finish(wire, request, size) for wire in wires])

    return works, rest


def _start_allgather(request: Request, context: Context) -> Started:
    size, group = len(request.process_set.members), request.group
    locals_ = [tensor.detach().reshape(1) if tensor.dim() == 0 else tensor for tensor in request.tensors]
    if size == 1:
        return [], lambda: _results(request, [_copy(tensor) for tensor in locals_])
    rows = request.rows
    if rows is None:
        rows = agree_on_rows(
            locals_,
            group,
            request.process_set.members,
            control=context.control,
            function="allgather",
        )
        request.rows = rows
    per_row = [row_bytes(tensor) for tensor in locals_]
    lengths = [  # of each member's tensors, in bytes
        [count * width for count, width in zip(counts, per_row, strict=True)]
        for counts in zip(*rows, strict=True)
    ]
    totals = [sum(own) for own in lengths]
    longest = max(totals, default=0)
    wire = join_bytes(locals_)
    if wire.numel() < longest:
        wire = torch.cat([wire, wire.new_zeros(longest - wire.numel())])
    flat = wire.new_empty(longest * size)
    works = [start_gather(flat, wire, group)] if longest > 0 else []

    def rest() -> Any:
        if len(locals_) == 1 and min(totals) == longest:
            outputs = [flat]
        else:
            parts = [
                torch.split(line[:total], own)
                for line, total, own in zip(flat.view(size, longest), totals, lengths, strict=True)
            ]
            outputs = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        results = [
            output.view(tensor.dtype).reshape(sum(counts), *tensor.shape[1:])
            for output, tensor, counts in zip(outputs, locals_, rows, strict=True)
        ]
        return _results(request, results)

    return works, rest


def _start_broadcast(request: Request, context: Context) -> Started:
    outputs = request.outputs
    if outputs is None:
        outputs = [_copy(tensor) for tensor in request.tensors]
    else:
        for output, tensor in zip(outputs, request.tensors, strict=True):
            if output is not tensor:
                output.copy_(tensor)
    joined = join_bytes(outputs)
    works: list[dist.Work] = []
    if len(request.process_set.members) > 1 and joined.numel() > 0:
        group = request.group
        works = [dist.broadcast(joined, request.root, group=group, async_op=True)]

    def rest() -> Any:
        if context.world.rank != request.root:
            pieces = torch.split(joined, [output.numel() * output.element_size() for output in outputs])
            for output, piece in zip(outputs, pieces, strict=True):
                if piece.data_ptr() != output.data_ptr() or not output.is_contiguous():
                    # clone: a view of another dtype must start at a multiple of its size
                    output.copy_(piece.clone().view(output.dtype).view(output.shape))
        return _group(request, outputs)

    return works, rest


def _start_alltoall(request: Request, context: Context) -> Started:
    (tensor,) = request.tensors
    members, group = request.process_set.members, request.group
    size, me = len(members), members.index(context.world.rank)
    mine = _splits(request, size)
    if request.rows is not None:
        table = request.rows
    elif size == 1:
        table = [mine]
    else:
        told = torch.tensor(mine, dtype=torch.int64, device=context.control)
        everyone = told.new_empty(size * size)
        wait_for(start_gather(everyone, told, group), told, group)
        table = everyone.view(size, size).tolist()
    received = [row[me] for row in table]
    width = row_bytes(tensor)
    source = as_bytes(tensor)
    output = source.new_empty(sum(received) * width)
    works: list[dist.Work] = []
    if size == 1:
        output.copy_(source)
    elif width > 0 and any(map(any, table)):
        works = [
            dist.all_to_all_single(
                output,
                source,
                [count * width for count in received],
                [count * width for count in mine],
                group=group,
                async_op=True,
            )
        ]

    def rest() -> Any:
        result = output.view(tensor.dtype).reshape(sum(received), *tensor.shape[1:])
        return _group(request, [result]), torch.tensor(received, dtype=torch.int32)

    return works, rest


def _start_reducescatter(request: Request, context: Context) -> Started:
    """Each member gets all others' rows of its share, and reduces them itself in the order of members."""
    members, group = request.process_set.members, request.group
    size, me = len(members), members.index(context.world.rank)
    sources = [tensor.detach().contiguous() for tensor in request.tensors]
    shares = [share_of_rows(tensor.shape[0], size) for tensor in sources]
    if size == 1:
        wires = [_wire(source, request, index) for index, source in enumerate(sources)]
        return [], lambda: _results(request, [_finish(wire, request, 1) for wire in wires])
    # One flat message: for each member the rows that it reduces, of every tensor.
    split = [torch.split(source, share) for source, share in zip(sources, shares, strict=True)]
    outgoing = [[as_bytes(parts[member]) for parts in split] for member in range(size)]
    sent = [sum(part.numel() for part in parts) for parts in outgoing]
    wire = torch.cat([part for parts in outgoing for part in parts])
    flat = wire.new_empty(sent[me] * size)
    works: list[dist.Work] = []
    if wire.numel() > 0:
        works = [dist.all_to_all_single(flat, wire, [sent[me]] * size, sent, group=group, async_op=True)]

    def rest() -> Any:
        own = [part.numel() for part in outgoing[me]]
        lines = [torch.split(line, own) for line in flat.view(size, sent[me])]
        results = []
        for index, parts in enumerate(split):
            pieces = [line[index].clone().view(parts[me].dtype).view(parts[me].shape) for line in lines]
            wide = reduced_in(parts[me].dtype, request.op)
            scaled = [_prescaled(piece, request, wide).to(wide) for piece in pieces]
            total = functools.reduce(_FOLD[request.op], scaled)
            results.append(_finish(total, request, size))
        return _results(request, results)

    return works, rest


def _start_barrier(request: Request, context: Context) -> Started:
    token = torch.zeros(1, dtype=torch.int32, device=context.control)
    work = dist.all_reduce(token, group=request.group, async_op=True)

    def rest() -> None:
        token.item()  # on a GPU the wait above only enqueues

    return [work], rest


_START: dict[Kind, Callable[[Request, Context], Started]] = {
    Kind.ALLREDUCE: _start_allreduce,
    Kind.ALLGATHER: _start_allgather,
    Kind.BROADCAST: _start_broadcast,
    Kind.ALLTOALL: _start_alltoall,
    Kind.REDUCESCATTER: _start_reducescatter,
    Kind.BARRIER: _start_barrier,
}


def share_of_rows(rows: int, size: int) -> list[int]:
    """How reducescatter shares rows among the members: the first ``rows % size`` get one more."""
    return [rows // size + (member < rows % size) for member in range(size)]


def _wire(tensor: torch.Tensor, request: Request, index: int) -> torch.Tensor:
    """A contiguous tensor of the dtype in which the reduction runs, that may be overwritten."""
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    dtype = tensor.dtype if half and request.narrow else reduced_in(tensor.dtype, request.op)
    scaled = _prescaled(tensor.detach(), request, dtype)
    if request.outputs is not None and dtype is tensor.dtype and request.outputs[index].is_contiguous():
        output = request.outputs[index].detach()
        return output if scaled.data_ptr() == output.data_ptr() else output.copy_(scaled)
    if scaled.data_ptr() != tensor.data_ptr() and scaled.is_contiguous():
        return scaled
    return scaled.to(dtype, memory_format=torch.contiguous_format, copy=True)


def _prescaled(tensor: torch.Tensor, request: Request, dtype: torch.dtype) -> torch.Tensor:
    """The tensor times the factor that comes before the reduction, for a reduction in ``dtype``."""
    if request.prescale == 1.0:
        return tensor
    if request.scaled_apart and tensor.dtype is torch.float16:
        return scaled_by(tensor, request.prescale).to(dtype)
    return scaled_by(tensor, request.prescale, dtype=dtype)


def _finish(wire: torch.Tensor, request: Request, size: int) -> torch.Tensor:
    """Divide and scale what the engine reduced, which may be overwritten."""
    if request.op is ReduceOp.Average and size > 1:
        if wire.dtype.is_floating_point:
            wire /= size
        else:
            wire = wire.div(size, rounding_mode="trunc")
    return scaled_by(wire, request.postscale)


def _splits(request: Request, size: int) -> list[int]:
    (tensor,) = request.tensors
    if request.splits is not None:
        splits: list[int] = request.splits.tolist()
        return splits
    return [tensor.shape[0] // size] * size


def _results(request: Request, results: Sequence[torch.Tensor]) -> Any:
    """Bring results to the inputs' dtype and, where outputs were given, into those."""
    typed = [result.to(tensor.dtype) for result, tensor in zip(results, request.tensors, strict=True)]
    if request.outputs is None:
        return _group(request, typed)
    for output, result in zip(request.outputs, typed, strict=True):
        if output.data_ptr() != result.data_ptr() or not output.is_contiguous():
            output.copy_(result)
    return _group(request, request.outputs)


def _group(request: Request, results: Sequence[torch.Tensor]) -> Any:
    return list(results) if request.grouped else results[0]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _by_dtype(wires: Sequence[torch.Tensor]) -> list[list[int]]:
    """Places of the tensors that can share a flat vector, in an order that all ranks have."""
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, wire in enumerate(wires):
        places.setdefault((wire.dtype, wire.device), []).append(place)
    return list(places.values())
