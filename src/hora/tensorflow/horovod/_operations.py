"""Hora's operations with Horovod's exceptions.

What a rank can see to be wrong by itself raises an exception that is a ``ValueError``, an
``InvalidArgumentError`` of TensorFlow and a ``HorovodInternalError``: Horovod raises now one, now the other,
and its scripts catch either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from hora.adapter.negotiation.errors import HorovodInternalError
from hora.core.errors import NotInitializedError, UsageError
from hora.tensorflow import _collectives, _gradients, _graph_values, _optimizer, _variables
from hora.tensorflow._autograph import unconverted
from hora.tensorflow.horovod._errors import InvalidArgumentError, UnsupportedError
from hora.tensorflow.horovod._session import session

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "alltoall",
    "as_horovod",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_variables",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]

P = ParamSpec("P")
R = TypeVar("R")


def as_horovod(function: Callable[P, R]) -> Callable[P, R]:
    """The function with Horovod's exceptions; a root may be an integer of NumPy."""

    @unconverted
    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        plain: Any = [int(value) if isinstance(value, np.integer) else value for value in args]
        named: Any = {
            name: int(value) if isinstance(value, np.integer) else value for name, value in kwargs.items()
        }
        try:
            return function(*plain, **named)
        except NotInitializedError:
            session(function.__name__)  # says so in Horovod's words
            raise
        except UsageError as error:
            if isinstance(error, HorovodInternalError):
                raise
            unsupported = isinstance(error, NotImplementedError)
            kind = UnsupportedError if unsupported else InvalidArgumentError
            raise kind(error.what, fix=error.fix) from error

    return wrapped


allreduce = as_horovod(_collectives.allreduce)
grouped_allreduce = as_horovod(_collectives.grouped_allreduce)
allgather = as_horovod(_collectives.allgather)
grouped_allgather = as_horovod(_collectives.grouped_allgather)
broadcast = as_horovod(_collectives.broadcast)
broadcast_ = as_horovod(_variables.broadcast_)
broadcast_variables = as_horovod(_variables.broadcast_variables)
alltoall = as_horovod(_collectives.alltoall)
reducescatter = as_horovod(_collectives.reducescatter)
grouped_reducescatter = as_horovod(_collectives.grouped_reducescatter)
barrier = as_horovod(_collectives.barrier)
size_op = as_horovod(_graph_values.size_op)
rank_op = as_horovod(_graph_values.rank_op)
local_size_op = as_horovod(_graph_values.local_size_op)
local_rank_op = as_horovod(_graph_values.local_rank_op)
process_set_included_op = _graph_values.process_set_included_op
DistributedGradientTape = as_horovod(_gradients.DistributedGradientTape)
PartialDistributedGradientTape = as_horovod(_gradients.PartialDistributedGradientTape)
DistributedOptimizer = as_horovod(_optimizer.DistributedOptimizer)
PartialDistributedOptimizer = as_horovod(_optimizer.PartialDistributedOptimizer)
