"""Checks of what a collective is given, each with the line to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hora.adapter import arguments
from hora.adapter.arguments import check_root
from hora.adapter.ops import ReduceOp
from hora.core.errors import CollectiveError
from hora.tensorflow._adasum import check_adasum
from hora.tensorflow._dtypes import is_reducible
from hora.tensorflow._process_sets import ProcessSet
from hora.tensorflow._request import Tensor, dispatcher

__all__ = ["check_reduction", "check_root", "check_splits", "dense", "dense_group", "operation"]

BY_NUMBER = dict(enumerate(ReduceOp))
"""Horovod numbers its operations: Average 0, Sum 1, Adasum 2, Min 3, Max 4, Product 5."""


def operation(average: bool | None, op: Any, *, function: str) -> ReduceOp:
    """The operation that Horovod's two arguments ask for: ``op``, or the older ``average``; or its number."""
    if isinstance(op, int) and not isinstance(op, bool) and op in BY_NUMBER:
        op = BY_NUMBER[op]
    as_horovod = dispatcher().as_horovod  # its forms are wrapped once more
    return arguments.operation(
        average,
        op,
        function=function,
        alias="hvd" if as_horovod else "hora",
        stacklevel=7 if as_horovod else 5,
    )


def dense(value: Any, *, function: str) -> Tensor:
    """The value as a tensor.

    Raises:
        CollectiveError: sparse, ragged, of texts, or no tensor at all.
    """
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor | tf.IndexedSlices):
        raise CollectiveError(
            f"{function} takes dense tensors, not {type(value).__name__}.",
            fix="Write tf.convert_to_tensor(value) or tf.sparse.to_dense(value) first.",
        )
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise CollectiveError(
            f"{function} takes a tensor, not {type(value).__name__}: {error}.",
            fix="Write tf.constant(value), or use hora.broadcast_object or hora.allgather_object.",
        ) from error
    if not is_reducible(tensor.dtype):
        raise CollectiveError(
            f"{function} does not take {tensor.dtype.name} tensors.",
            fix="Send texts and other objects with hora.broadcast_object or hora.allgather_object.",
        )
    return tensor


def dense_group(values: Any, *, function: str) -> list[Tensor]:
    """The tensors of a group."""
    if isinstance(values, tf.Tensor | tf.Variable) or not isinstance(values, Sequence):
        raise CollectiveError(
            f"{function} takes a list of tensors, not {type(values).__name__}.",
            fix=f"Write {function}([tensor, ...]).",
        )
    return [dense(value, function=function) for value in values]


def check_reduction(
    tensors: Sequence[Tensor], op: ReduceOp, process_set: ProcessSet, *, function: str
) -> None:
    """Raise CollectiveError for a dtype that ``op`` has no meaning for."""
    for dtype in {tensor.dtype for tensor in tensors}:
        if op is ReduceOp.Adasum:
            check_adasum(dtype, len(process_set.members), function=function)
        if dtype.is_complex and op in (ReduceOp.Min, ReduceOp.Max):
            raise CollectiveError(
                f"{function} has no {op.name} of {dtype.name} tensors: they have no order.",
                fix="Write tf.abs(tensor), or op=hora.Sum.",
            )
        if dispatcher().as_horovod:
            continue
        arguments.check_average(
            op,
            dtype.name,
            floating=dtype.is_floating or dtype.is_complex,
            cast="tf.cast(tensor, tf.float32)",
            function=function,
        )


def check_splits(tensor: Tensor, splits: Any, process_set: ProcessSet, *, function: str) -> Tensor | None:
    """The splits as a vector of int32; None splits evenly. A graph checks their values when it runs."""
    size = len(process_set.members)
    if tensor.shape.rank == 0:
        raise CollectiveError(
            f"{function} splits along the first dimension, but the tensor has none.",
            fix="Write tf.reshape(tensor, [1]), or use hora.allgather.",
        )
    if splits is None or (isinstance(splits, list | tuple) and not splits):
        rows = tensor.shape[0]
        if rows is not None and rows % size:
            raise CollectiveError(
                f"{function}: {rows} rows do not divide among {size} ranks.",
                fix=f"Give splits=[...], {size} numbers of rows that sum to {rows}.",
            )
        return None
    wanted = tf.convert_to_tensor(splits)
    if not wanted.dtype.is_integer or wanted.shape.rank != 1 or wanted.shape[0] not in (None, size):
        raise CollectiveError(
            f"{function}: splits={splits!r} are not {size} whole numbers.",
            fix="Give one number of rows for each rank of the process set.",
        )
    rows = tf.cast(wanted, tf.int32)
    if tf.executing_eagerly():
        check_split_values(tensor, rows, function=function)
    return rows


def check_split_values(tensor: Tensor, rows: Tensor, *, function: str) -> None:
    """Raise CollectiveError unless the splits use up the tensor's rows."""
    values = rows.numpy()
    if (values < 0).any() or int(values.sum()) != int(tensor.shape[0]):
        raise CollectiveError(
            f"{function}: splits={values.tolist()} do not sum to the {int(tensor.shape[0])} rows of the "
            "tensor.",
            fix="Let the numbers be 0 or more and sum to tensor.shape[0].",
        )
