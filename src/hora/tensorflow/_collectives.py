"""Collectives that combine tensors or hand them on, with Horovod's names and order of arguments.

All take tensors, variables and what TensorFlow makes tensors of; all work eagerly and inside a
``tf.function``. Gradients are those of the sum of the ranks' losses (:mod:`hora.tensorflow._autograd`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hora.adapter.ops import Kind, ReduceOp
from hora.core.errors import CollectiveError
from hora.tensorflow import _autograd
from hora.tensorflow._adasum import NotOfAdasumError
from hora.tensorflow._autograph import unconverted
from hora.tensorflow._checks import check_reduction, check_root, check_splits, dense, dense_group, operation
from hora.tensorflow._compression import Compressing, Compression
from hora.tensorflow._context import required
from hora.tensorflow._grouped import NARROW, reduce_group
from hora.tensorflow._process_sets import ProcessSet, global_process_set, member_set
from hora.tensorflow._request import Request, Tensor, run

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product


@unconverted
def allreduce(  # noqa: PLR0917 - as Horovod
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combine the tensors of all ranks element by element.

    Args:
        tensor: of the same shape and dtype on all ranks. ``tf.IndexedSlices`` are gathered instead, which
            needs no equal number of slices.
        average: the older form of ``op``.
        device_dense: accepted for scripts written for Horovod; the tensor stays where it is.
        device_sparse: likewise.
        compression: what travels; see :class:`Compression`.
        op: ``Average`` unless told otherwise; ``Sum``, ``Min``, ``Max``, ``Product``, ``Adasum``.
        prescale_factor: multiplies the tensor before.
        postscale_factor: multiplies the result.
        name: appears in errors, verdicts and the timeline.
        process_set: the ranks that take part; only they call.
        ignore_name_scope: accepted for scripts written for Horovod.

    Returns:
        A tensor of the shape and dtype of ``tensor``, the same on all ranks; or ``tf.IndexedSlices``.

    Raises:
        CollectiveError: an operation that the dtype does not have, or ranks that give different tensors.
    """
    function = "allreduce"
    required(function)
    member_set(process_set, function=function)
    op = operation(average, op, function=function)
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse(tensor, op, prescale_factor, postscale_factor, name, process_set, compression)
    given = dense(tensor, function=function)
    check_reduction([given], op, process_set, function=function)
    small, context = compression.compress(given)
    request = Request(
        kind=Kind.ALLREDUCE,
        tensors=[small],
        name=name,
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
        process_set=process_set,
        narrow=compression in NARROW,
    )
    return compression.decompress(_autograd.run(request)[0], context)


@unconverted
def grouped_allreduce(  # noqa: PLR0917 - as Horovod
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressing = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """:func:`allreduce` of several tensors, in one message for each dtype.

    ``tf.IndexedSlices`` among them are made dense.
    """
    return reduce_group(
        tensors,
        op=operation(average, op, function="grouped_allreduce"),
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


@unconverted
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The rows of all ranks' tensors, in the order of ranks.

    Args:
        tensor: its first dimension may differ between ranks, and be 0; the others and the dtype may not. A
            tensor without dimensions counts as one row.
        name: appears in errors, verdicts and the timeline.
        ignore_name_scope: accepted for scripts written for Horovod.
        process_set: the ranks that take part; only they call.
    """
    function = "allgather"
    required(function)
    member_set(process_set, function=function)
    given = dense(tensor, function=function)
    return _autograd.run(Request(kind=Kind.ALLGATHER, tensors=[given], name=name, process_set=process_set))[0]


@unconverted
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """:func:`allgather` of several tensors."""
    function = "grouped_allgather"
    required(function)
    member_set(process_set, function=function)
    given = dense_group(tensors, function=function)
    if not given:
        return []
    request = Request(kind=Kind.ALLGATHER, tensors=given, name=name, process_set=process_set, grouped=True)
    return _autograd.run(request)[: len(given)]


@unconverted
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The tensor of one rank.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: whose; counted in the whole job, with a process set too.
        name: appears in errors, verdicts and the timeline.
        ignore_name_scope: accepted for scripts written for Horovod.
        process_set: the ranks that take part; only they call.
    """
    function = "broadcast"
    context = required(function)
    member_set(process_set, function=function)
    check_root(root_rank, context, function=function, process_set=process_set)
    given = dense(tensor, function=function)
    return _autograd.run(
        Request(kind=Kind.BROADCAST, tensors=[given], name=name, root=int(root_rank), process_set=process_set)
    )[0]


@unconverted
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of the rows to each rank, and get one from each.

    Args:
        tensor: its first dimension is shared out; the others and the dtype are the same on all ranks.
        splits: how many rows go to each rank; None: equally many.
        name: appears in errors, verdicts and the timeline.
        ignore_name_scope: accepted for scripts written for Horovod.
        process_set: the ranks that take part; only they call.

    Returns:
        The rows that came, in the order of ranks; with ``splits`` also how many came from each, as int32.
    """
    function = "alltoall"
    required(function)
    member_set(process_set, function=function)
    given = dense(tensor, function=function)
    rows = check_splits(given, splits, process_set, function=function)
    request = Request(kind=Kind.ALLTOALL, tensors=[given], splits=rows, name=name, process_set=process_set)
    output, received = _autograd.run(request)
    return output if splits is None else (output, received)


@unconverted
def reducescatter(  # noqa: PLR0917 - as Horovod
    tensor: Any,
    device_dense: str = "",
    compression: Compressing = Compression.none,
    op: ReduceOp | None = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine the tensors of all ranks element by element; each rank gets some rows of the result.

    The rows are shared in the order of ranks. If they do not divide evenly, the first ranks get one more.

    Args:
        tensor: of the same shape and dtype on all ranks, with one dimension at least.
        device_dense: accepted for scripts written for Horovod.
        compression: what travels.
        op: ``Average`` or ``Sum``; ``Min``, ``Max`` and ``Product`` without a gradient.
        name: appears in errors, verdicts and the timeline.
        process_set: the ranks that take part; only they call.
        ignore_name_scope: accepted for scripts written for Horovod.
        prescale_factor: multiplies the tensor before.
        postscale_factor: multiplies the result.
    """
    return _reducescatter(
        [tensor],
        "reducescatter",
        compression=compression,
        op=op,
        name=name,
        process_set=process_set,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )[0]


@unconverted
def grouped_reducescatter(  # noqa: PLR0917 - as Horovod
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressing = Compression.none,
    op: ReduceOp | None = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """:func:`reducescatter` of several tensors."""
    return _reducescatter(
        tensors,
        "grouped_reducescatter",
        compression=compression,
        op=op,
        name=name,
        process_set=process_set,
        prescale=prescale_factor,
        postscale=postscale_factor,
    )


@unconverted
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> None:
    """Wait until all ranks have come here."""
    function = "barrier"
    required(function)
    member_set(process_set, function=function)
    run(Request(kind=Kind.BARRIER, tensors=[], name=name, process_set=process_set))


def _reducescatter(
    tensors: Any,
    function: str,
    *,
    compression: Any,
    op: Any,
    name: str | None,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
) -> list[Tensor]:
    required(function)
    member_set(process_set, function=function)
    op = operation(None, op, function=function)
    given = dense_group(tensors, function=function)
    if not given:
        return []
    check_reduction(given, op, process_set, function=function)
    if op is Adasum:
        raise CollectiveError(f"{function} has no Adasum.", fix="Write op=hora.Sum or op=hora.Average.")
    if any(tensor.shape.rank == 0 for tensor in given):
        raise CollectiveError(
            f"{function} shares out rows, but a tensor has no dimensions.",
            fix="Write tf.reshape(tensor, [1]), or use hora.allreduce.",
        )
    small, contexts = zip(*(compression.compress(tensor) for tensor in given), strict=True)
    request = Request(
        kind=Kind.REDUCESCATTER,
        tensors=list(small),
        name=name,
        op=op,
        prescale=float(prescale),
        postscale=float(postscale),
        process_set=process_set,
        grouped=function.startswith("grouped"),
    )
    return [
        compression.decompress(result, context)
        for result, context in zip(_autograd.run(request), contexts, strict=True)
    ]


def _sparse(  # noqa: PLR0917
    slices: tf.IndexedSlices,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
    compression: Any,
) -> tf.IndexedSlices:
    """All ranks' slices together: those of one row are added up where they are used."""
    if op not in (Average, Sum):
        raise NotOfAdasumError(
            f"allreduce of IndexedSlices has Average and Sum, not {op.name}.",
            fix="Write op=hora.Sum, or tf.convert_to_tensor(slices) first.",
        )
    factor = float(prescale) * float(postscale) / (len(process_set.members) if op is Average else 1)
    values, context = compression.compress(slices.values)
    parts = [f"{name}.{part}" if name else None for part in ("values", "indices")]
    values = compression.decompress(allgather(values, parts[0], process_set=process_set), context)
    indices = allgather(slices.indices, parts[1], process_set=process_set)
    if factor != 1.0:
        values = values * factor
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)
