"""Hora for PyTorch: ``import hora.torch as hora``.

Four calls turn a training script for one worker into one for many: ``init``, ``data_loader``,
``DistributedOptimizer`` and ``broadcast_parameters``. The names are those that Horovod made standard.
"""

from __future__ import annotations

from hora.torch._collectives import (
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allgather,
    allreduce,
    barrier,
    broadcast,
)
from hora.torch._context import (
    Context,
    context,
    cross_rank,
    cross_size,
    device,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hora.torch._loader import Loader, data_loader
from hora.torch._metrics import mean
from hora.torch._objects import allgather_object, broadcast_object
from hora.torch._optimizer import DistributedOptimizer
from hora.torch._state import broadcast_optimizer_state, broadcast_parameters
from hora.torch._track import Tracker, track

__all__ = [
    "Average",
    "Context",
    "DistributedOptimizer",
    "Loader",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "Tracker",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "context",
    "cross_rank",
    "cross_size",
    "data_loader",
    "device",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mean",
    "rank",
    "shutdown",
    "size",
    "track",
]
