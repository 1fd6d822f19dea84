"""Hora for Keras 3, on TensorFlow, JAX and PyTorch: ``import hora.keras as hora``.

``init``, ``DistributedOptimizer``, ``callbacks.BroadcastGlobalVariablesCallback`` and ``data_loader`` turn a
script with ``model.fit`` for one worker into one for many. The names are those that Horovod made standard.
"""

from __future__ import annotations

from typing import Any

from hora.keras import (
    callbacks as callbacks,
)
from hora.keras import (
    elastic as elastic,
)
from hora.keras._backend import (
    api as _api,
)
from hora.keras._batch_norm import (
    SyncBatchNormalization,
)
from hora.keras._context import (
    init,
    shutdown,
)
from hora.keras._data import (
    Batches,
    data_loader,
)
from hora.keras._metrics import (
    evaluate,
)
from hora.keras._models import (
    load_model,
)
from hora.keras._optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from hora.keras._values import (
    allgather,
    allreduce,
    broadcast,
    reducescatter,
)
from hora.keras._variables import (
    broadcast_global_variables,
    broadcast_variables,
)

Adasum: Any = _api.Adasum
Average: Any = _api.Average
Compression: Any = _api.Compression
Max: Any = _api.Max
Min: Any = _api.Min
ProcessSet: Any = _api.ProcessSet
Product: Any = _api.Product
Sum: Any = _api.Sum
add_process_set: Any = _api.add_process_set
allgather_object: Any = _api.allgather_object
barrier: Any = _api.barrier
broadcast_object: Any = _api.broadcast_object
cross_rank: Any = _api.cross_rank
cross_size: Any = _api.cross_size
global_process_set: Any = _api.global_process_set
is_homogeneous: Any = _api.is_homogeneous
is_initialized: Any = _api.is_initialized
local_rank: Any = _api.local_rank
local_size: Any = _api.local_size
mean: Any = _api.mean
only: Any = _api.only
rank: Any = _api.rank
remove_process_set: Any = _api.remove_process_set
size: Any = _api.size

__all__ = [
    "Adasum",
    "Average",
    "Batches",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "data_loader",
    "evaluate",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mean",
    "only",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
]
