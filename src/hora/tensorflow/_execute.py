"""Each collective in terms of what the engine has."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import tensorflow as tf

from hora.adapter.ops import Kind, ReduceOp
from hora.tensorflow._adasum import adasum
from hora.tensorflow._dtypes import narrowed, reduced_in, scaled_by, widened
from hora.tensorflow._engine import Carrier, Group
from hora.tensorflow._lanes import from_lanes, lane_count, to_lanes
from hora.tensorflow._request import Request, Tensor

__all__ = ["counts", "exchange_rows", "execute"]

MERGE = {
    ReduceOp.Average: "Add",
    ReduceOp.Sum: "Add",
    ReduceOp.Min: "Min",
    ReduceOp.Max: "Max",
    ReduceOp.Product: "Mul",
}

FOLD = {
    ReduceOp.Average: tf.reduce_sum,
    ReduceOp.Sum: tf.reduce_sum,
    ReduceOp.Min: tf.reduce_min,
    ReduceOp.Max: tf.reduce_max,
    ReduceOp.Product: tf.reduce_prod,
}


def counts(request: Request, group: Group) -> list[int]:
    """What this rank tells the others about its rows, before an allgather or an alltoall."""
    if request.kind is Kind.ALLGATHER:
        return [int(tensor.shape[0]) if tensor.shape.rank else 1 for tensor in request.tensors]
    if request.splits is not None:
        return [int(count) for count in request.splits.numpy()]
    return [int(request.tensors[0].shape[0]) // group.size] * group.size


def exchange_rows(mine: Sequence[int], engine: Carrier, group: Group) -> list[list[int]]:
    """The :func:`counts` of all members; all give as many."""
    told: list[list[int]] = engine.gather(tf.constant(mine, tf.int64), group).numpy().tolist()
    return told


def execute(request: Request, engine: Carrier, group: Group) -> list[Tensor]:
    """Carry out what all members have agreed on; see :class:`hora.tensorflow._request.Dispatcher`."""
    match request.kind:
        case Kind.ALLREDUCE:
            return _allreduce(request, engine, group)
        case Kind.ALLGATHER:
            return _allgather(request, engine, group)
        case Kind.BROADCAST:
            return _broadcast(request, engine, group)
        case Kind.ALLTOALL:
            return _alltoall(request, engine, group)
        case Kind.REDUCESCATTER:
            return [_reducescatter(tensor, request, engine, group) for tensor in request.tensors]
        case Kind.BARRIER:
            return [engine.reduce(tf.constant([1]), "Add", group)]


def _allreduce(request: Request, engine: Carrier, group: Group) -> list[Tensor]:
    if _is_plain(request):
        divisor = group.size if request.op is ReduceOp.Average else 1
        return [engine.reduce(tensor, "Add", group, divisor=divisor) for tensor in request.tensors]
    results: list[Tensor] = [None] * len(request.tensors)
    buckets: dict[tf.DType, list[int]] = {}
    wide = []
    for place, tensor in enumerate(request.tensors):
        narrow = request.narrow and request.op is not ReduceOp.Adasum
        dtype = reduced_in(tensor.dtype, request.op, narrow=narrow)
        flat = widened(tf.reshape(tensor, [-1]), dtype, request.op)
        wide.append(scaled_by(flat, request.prescale, like=tensor.dtype))
        buckets.setdefault(dtype, []).append(place)
    for dtype, places in buckets.items():
        parts = [wide[place] for place in places]
        lengths = [int(part.shape[0]) for part in parts]
        flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        if request.op is ReduceOp.Adasum:
            total = adasum(flat, lengths, engine, group)
        else:
            total = _reduced(flat, request.op, engine, group)
            total = _averaged(total, dtype, request, group)
        split = [total] if len(parts) == 1 else tf.split(total, lengths)
        for place, part in zip(places, split, strict=True):
            given = request.tensors[place]
            scaled = scaled_by(part, request.postscale, like=given.dtype)
            results[place] = tf.reshape(narrowed(scaled, given.dtype, request.op), given.shape)
    return results


def _is_plain(request: Request) -> bool:
    """Whether the engine can take all as it is, as a step's gradients: nothing else is to be computed."""
    return (
        request.op in (ReduceOp.Average, ReduceOp.Sum)
        and (request.prescale, request.postscale) == (1.0, 1.0)
        and all(
            tensor.dtype in (tf.float32, tf.float64) and tensor.shape.rank == 1 for tensor in request.tensors
        )
    )


def _reduced(flat: Tensor, op: ReduceOp, engine: Carrier, group: Group) -> Tensor:
    """The engine has no complex numbers: they travel as pairs, or all to all where pairs do not do."""
    if not flat.dtype.is_complex:
        return engine.reduce(flat, MERGE[op], group)
    if op is ReduceOp.Product:
        gathered = engine.gather(to_lanes(flat), group)
        length = int(flat.shape[0])
        factors = [from_lanes(gathered[place], length, flat.dtype) for place in range(group.size)]
        return tf.reduce_prod(tf.stack(factors), 0)
    pairs = tf.concat([tf.math.real(flat), tf.math.imag(flat)], 0)
    return tf.complex(*tf.split(engine.reduce(pairs, "Add", group), 2))


def _averaged(total: Tensor, dtype: tf.DType, request: Request, group: Group) -> Tensor:
    if request.op is not ReduceOp.Average or group.size == 1:
        return total
    if dtype.is_integer:
        return tf.truncatediv(total, tf.constant(group.size, dtype))
    return total / tf.cast(group.size, dtype)


def _allgather(request: Request, engine: Carrier, group: Group) -> list[Tensor]:
    assert request.rows is not None
    results, firsts = [], []
    for place, given in enumerate(request.tensors):
        tensor = given if given.shape.rank else tf.reshape(given, [1])
        rows = [each[place] for each in request.rows]
        inner = [int(size) for size in tensor.shape[1:]]
        width = math.prod(inner)
        longest = lane_count(max(rows) * width, tensor.dtype)
        mine = to_lanes(tensor)
        gathered = engine.gather(tf.pad(mine, [[0, longest - int(mine.shape[0])]]), group)
        parts = [
            from_lanes(gathered[member], count * width, tensor.dtype) for member, count in enumerate(rows)
        ]
        results.append(tf.reshape(tf.concat(parts, 0), [sum(rows), *inner]))
        firsts.append(tf.constant(sum(rows[: group.place])))
    return results + firsts


def _broadcast(request: Request, engine: Carrier, group: Group) -> list[Tensor]:
    root = request.process_set.members.index(request.root)
    results: list[Tensor] = [None] * len(request.tensors)
    lanes = [to_lanes(tensor) for tensor in request.tensors]
    order = sorted(range(len(lanes)), key=lambda place: lanes[place].dtype.name)
    for _, run in itertools.groupby(order, key=lambda place: lanes[place].dtype.name):
        places = list(run)
        parts = [lanes[place] for place in places]
        flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        flat = engine.broadcast(flat, root, group)
        split = [flat] if len(parts) == 1 else tf.split(flat, [int(part.shape[0]) for part in parts])
        for place, part in zip(places, split, strict=True):
            given = request.tensors[place]
            results[place] = tf.reshape(from_lanes(part, math.prod(given.shape), given.dtype), given.shape)
    return results


def _alltoall(request: Request, engine: Carrier, group: Group) -> list[Tensor]:
    assert request.rows is not None
    tensor, matrix = request.tensors[0], request.rows
    inner = [int(size) for size in tensor.shape[1:]]
    width = math.prod(inner)
    longest = lane_count(max(map(max, matrix)) * width, tensor.dtype)
    lanes = []
    for part in tf.split(tensor, matrix[group.place]):
        mine = to_lanes(part)
        lanes.append(tf.pad(mine, [[0, longest - int(mine.shape[0])]]))
    swapped = engine.swap(tf.stack(lanes), group)
    received = [row[group.place] for row in matrix]
    parts = [
        from_lanes(swapped[member], count * width, tensor.dtype) for member, count in enumerate(received)
    ]
    return [tf.reshape(tf.concat(parts, 0), [sum(received), *inner]), tf.constant(received, tf.int32)]


def _reducescatter(tensor: Tensor, request: Request, engine: Carrier, group: Group) -> Tensor:
    """Each rank gets the others' parts of its rows and combines them: the engine cannot on the CPU."""
    dtype = reduced_in(tensor.dtype, request.op, narrow=False)
    inner = [int(size) for size in tensor.shape[1:]]
    share, extra = divmod(int(tensor.shape[0]), group.size)
    rows = [share + (member < extra) for member in range(group.size)]
    wide = scaled_by(widened(tensor, dtype, request.op), request.prescale, like=tensor.dtype)
    flat = [tf.reshape(part, [-1]) for part in tf.split(wide, rows)]
    longest = max(int(part.shape[0]) for part in flat)
    lanes = [tf.pad(part, [[0, longest - int(part.shape[0])]]) for part in flat]
    pairs = dtype.is_complex
    if pairs:
        lanes = [tf.concat([tf.math.real(part), tf.math.imag(part)], 0) for part in lanes]
    swapped = engine.swap(tf.stack(lanes), group)
    if pairs:
        swapped = tf.complex(*tf.split(swapped, 2, axis=1))
    total = _averaged(FOLD[request.op](swapped, 0), dtype, request, group)
    mine = scaled_by(total[: rows[group.place] * math.prod(inner)], request.postscale, like=tensor.dtype)
    return tf.reshape(narrowed(mine, tensor.dtype, request.op), [rows[group.place], *inner])
