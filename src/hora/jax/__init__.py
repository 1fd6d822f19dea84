"""Hora for JAX: ``import hora.jax as hora``.

Four calls turn a training script for one worker into one for many: ``init``, ``data_loader``,
``DistributedOptimizer`` and ``broadcast_parameters``; and ``spmd`` takes the place of ``jax.jit``. The
names are those that Horovod made standard.
"""

from __future__ import annotations

from hora.jax import (
    elastic as elastic,
)
from hora.jax._arrays import (
    global_array,
    local,
    mesh,
    replicate,
)
from hora.jax._collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hora.jax._compression import (
    Compression,
    Compressor,
)
from hora.jax._context import (
    Context,
    context,
    cross_rank,
    cross_size,
    device,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hora.jax._loader import (
    Loader,
    data_loader,
)
from hora.jax._mesh import (
    AXIS,
)
from hora.jax._metrics import (
    mean,
)
from hora.jax._moves import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
)
from hora.jax._objects import (
    allgather_object,
    broadcast_object,
)
from hora.jax._only import (
    only,
)
from hora.jax._optimizer import (
    DistributedOptimizer,
)
from hora.jax._own import (
    Accumulated,
    Own,
)
from hora.jax._process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_ids,
    process_set_included,
    remove_process_set,
)
from hora.jax._spmd import (
    spmd,
    watched,
)
from hora.jax._state import (
    broadcast_parameters,
)
from hora.jax._timeline import (
    start_timeline,
    stop_timeline,
)

__all__ = [
    "AXIS",
    "Accumulated",
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "Context",
    "DistributedOptimizer",
    "Loader",
    "Max",
    "Min",
    "Own",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "context",
    "cross_rank",
    "cross_size",
    "data_loader",
    "device",
    "global_array",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local",
    "local_rank",
    "local_size",
    "mean",
    "mesh",
    "only",
    "process_set_ids",
    "process_set_included",
    "rank",
    "reducescatter",
    "remove_process_set",
    "replicate",
    "shutdown",
    "size",
    "spmd",
    "start_timeline",
    "stop_timeline",
    "watched",
]
