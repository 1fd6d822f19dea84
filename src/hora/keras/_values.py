"""Collectives on values: numbers, NumPy arrays, and the backend's tensors, outside of compiled steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hora.keras._backend import api, engine

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    *,
    op: Any = api.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = api.Compression.none,
    process_set: Any = api.global_process_set,
) -> Any:
    """One value from those of all ranks.

    Args:
        value: a number, an array of NumPy, a tensor or variable of the backend; the same shape and dtype on
            every rank. On JAX without ``jax_enable_x64`` numbers of 64 bits become such of 32, as always
            there.
        name: appears in the timeline and in messages.
        op: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        prescale_factor: multiplies each rank's value before.
        postscale_factor: multiplies the result.
        compression: how it travels.
        process_set: the ranks that take part; only they call.

    Returns:
        A float for a number, a NumPy array for an array, a tensor for a tensor.

    Raises:
        CollectiveError: a dtype or operation that cannot be; on every rank, when shapes or dtypes differ.
    """
    tensor, back = _taken(value)
    result = api.allreduce(
        tensor,
        name=name,
        op=op,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return back(result)


def allgather(value: Any, name: str | None = None, *, process_set: Any = api.global_process_set) -> Any:
    """The rows of all ranks' values, one after the other, in the order of ranks.

    Args:
        value: as for :func:`allreduce`; the first dimension may differ between ranks.
        name: appears in the timeline and in messages.
        process_set: the ranks that take part; only they call.

    Returns:
        A NumPy array for a number or an array, a tensor for a tensor.
    """
    tensor, back = _taken(value, number=np.asarray)
    return back(api.allgather(tensor, name=name, process_set=process_set))


def broadcast(
    value: Any, root_rank: int = 0, name: str | None = None, *, process_set: Any = api.global_process_set
) -> Any:
    """The value of ``root_rank``, on every rank.

    Args:
        value: as for :func:`allreduce`.
        root_rank: whose value it is; counted in the whole job, with a process set too.
        name: appears in the timeline and in messages.
        process_set: the ranks that take part; only they call.

    Returns:
        A float for a number, a NumPy array for an array, a tensor for a tensor.
    """
    tensor, back = _taken(value)
    return back(api.broadcast(tensor, root_rank=root_rank, name=name, process_set=process_set))


def reducescatter(
    value: Any, name: str | None = None, *, op: Any = api.Average, process_set: Any = api.global_process_set
) -> Any:
    """One value from those of all ranks, of which each rank gets some rows.

    Args:
        value: as for :func:`allreduce`, of one dimension or more.
        name: appears in the timeline and in messages.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part; only they call.

    Returns:
        A NumPy array for an array, a tensor for a tensor.
    """
    tensor, back = _taken(value, number=np.asarray)
    return back(api.reducescatter(tensor, name=name, op=op, process_set=process_set))


def _taken(value: Any, *, number: Any = float) -> tuple[Any, Any]:
    """The value as a tensor of the backend, and what makes a result of the value's kind from one."""
    if isinstance(value, keras.Variable):
        value = value.value
    if keras.ops.is_tensor(value):
        return value, lambda result: result
    array = np.asarray(value)
    made: Any = number if isinstance(value, bool | int | float) else np.asarray
    return engine.native(array), lambda result: made(keras.ops.convert_to_numpy(result))
