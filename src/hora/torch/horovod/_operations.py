"""Hora's operations with Horovod's exceptions.

What a rank can see to be wrong by itself raises an exception that is both a ``ValueError`` and a
``HorovodInternalError`` (so a ``RuntimeError``): Horovod raises now one, now the other, and its scripts
catch either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from hora.adapter.negotiation.errors import HorovodInternalError
from hora.adapter.ops import ReduceOp
from hora.core.errors import CollectiveError, NotInitializedError, UsageError
from hora.torch import _collectives, _exchange, _reducescatter, _sparse
from hora.torch._handles import Handle
from hora.torch._handles import poll as _poll
from hora.torch._handles import synchronize as _synchronize
from hora.torch.horovod._session import session

__all__ = [
    "InvalidArgumentError",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "by_number",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]

P = ParamSpec("P")
R = TypeVar("R")


_OPS = (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum, ReduceOp.Min, ReduceOp.Max, ReduceOp.Product)
"""By Horovod's numbers."""


class InvalidArgumentError(CollectiveError, HorovodInternalError):
    """An operation was given something that it cannot take."""

    slug = "collective"


def _as_horovod(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if "op" in kwargs:
            kwargs["op"] = by_number(kwargs["op"])
        try:
            return function(*args, **kwargs)
        except NotInitializedError:
            session(function.__name__)  # says so in Horovod's words
            raise
        except UsageError as error:
            if isinstance(error, HorovodInternalError):
                raise
            raise InvalidArgumentError(error.what, fix=error.fix) from error

    return wrapped


def _plain_root(function: Callable[P, R]) -> Callable[P, R]:
    """Takes the root as an integer of numpy too."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> R:
        if len(args) > 1 and isinstance(args[1], np.integer):
            args = (args[0], int(args[1]), *args[2:])
        elif isinstance(kwargs.get("root_rank"), np.integer):
            kwargs["root_rank"] = int(kwargs["root_rank"])
        return function(*args, **kwargs)

    return wrapped


allreduce = _as_horovod(_collectives.allreduce)
allreduce_ = _as_horovod(_collectives.allreduce_)
allreduce_async = _as_horovod(_collectives.allreduce_async)
allreduce_async_ = _as_horovod(_collectives.allreduce_async_)
grouped_allreduce = _as_horovod(_collectives.grouped_allreduce)
grouped_allreduce_ = _as_horovod(_collectives.grouped_allreduce_)
grouped_allreduce_async = _as_horovod(_collectives.grouped_allreduce_async)
grouped_allreduce_async_ = _as_horovod(_collectives.grouped_allreduce_async_)
allgather = _as_horovod(_exchange.allgather)
allgather_async = _as_horovod(_exchange.allgather_async)
grouped_allgather = _as_horovod(_exchange.grouped_allgather)
grouped_allgather_async = _as_horovod(_exchange.grouped_allgather_async)
broadcast = _plain_root(_as_horovod(_exchange.broadcast))
broadcast_ = _plain_root(_as_horovod(_exchange.broadcast_))
broadcast_async = _plain_root(_as_horovod(_exchange.broadcast_async))
broadcast_async_ = _plain_root(_as_horovod(_exchange.broadcast_async_))
alltoall = _as_horovod(_exchange.alltoall)
alltoall_async = _as_horovod(_exchange.alltoall_async)
barrier = _as_horovod(_exchange.barrier)
reducescatter = _as_horovod(_reducescatter.reducescatter)
reducescatter_async = _as_horovod(_reducescatter.reducescatter_async)
grouped_reducescatter = _as_horovod(_reducescatter.grouped_reducescatter)
grouped_reducescatter_async = _as_horovod(_reducescatter.grouped_reducescatter_async)
sparse_allreduce_async = _as_horovod(_sparse.sparse_allreduce_async)
poll = _as_horovod(_poll)


def by_number(op: Any) -> Any:
    """The operation that Horovod has under a number; anything else as it is."""
    if isinstance(op, int) and not isinstance(op, bool) and 0 <= op < len(_OPS):
        return _OPS[op]
    return op


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result; None for a handle whose result was taken before.

    Raises:
        HorovodInternalError: the ranks asked for different things, or a rank is gone.
    """
    if isinstance(handle, Handle) and handle._works is None:
        return None
    return _synchronize(handle)
