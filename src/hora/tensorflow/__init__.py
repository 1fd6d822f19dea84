"""Hora for TensorFlow: ``import hora.tensorflow as hora``.

Four calls turn a training script for one worker into one for many: ``init``, ``data_loader``,
``DistributedGradientTape`` (or ``DistributedOptimizer``) and ``broadcast_variables``. The names are those
that Horovod made standard.
"""

from __future__ import annotations

from hora.tensorflow import (
    elastic as elastic,
)
from hora.tensorflow._batch_norm import (
    SyncBatchNormalization,
)
from hora.tensorflow._collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hora.tensorflow._compression import (
    Compression,
    Compressor,
)
from hora.tensorflow._context import (
    Context,
    context,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hora.tensorflow._gradients import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from hora.tensorflow._graph_values import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hora.tensorflow._loader import (
    Loader,
    data_loader,
    shard,
)
from hora.tensorflow._metrics import (
    mean,
)
from hora.tensorflow._objects import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
)
from hora.tensorflow._only import (
    only,
)
from hora.tensorflow._optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from hora.tensorflow._process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_ids,
    process_set_included,
    remove_process_set,
)
from hora.tensorflow._queries import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    gpu_available,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hora.tensorflow._variables import (
    broadcast_,
    broadcast_variables,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "Context",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Loader",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "context",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data_loader",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mean",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "only",
    "process_set_ids",
    "process_set_included",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shard",
    "shutdown",
    "size",
    "size_op",
]
