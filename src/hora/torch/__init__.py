"""Hora for PyTorch: ``import hora.torch as hora``.

Four calls turn a training script for one worker into one for many: ``init``, ``data_loader``,
``DistributedOptimizer`` and ``broadcast_parameters``. The names are those that Horovod made standard.
"""

from __future__ import annotations

from hora.torch import (
    elastic as elastic,
)
from hora.torch._collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    ReduceOp,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from hora.torch._compression import (
    Compression,
    Compressor,
)
from hora.torch._context import (
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
from hora.torch._error_feedback import (
    PowerSGD,
    TopK,
)
from hora.torch._exchange import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from hora.torch._handles import (
    Handle,
    poll,
    synchronize,
)
from hora.torch._join import (
    join,
)
from hora.torch._loader import (
    Loader,
    data_loader,
)
from hora.torch._metrics import (
    mean,
)
from hora.torch._micro import (
    Share,
)
from hora.torch._objects import (
    allgather_object,
    broadcast_object,
)
from hora.torch._only import (
    only,
)
from hora.torch._optimizer import (
    DistributedOptimizer,
)
from hora.torch._process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    process_set_ids,
    process_set_included,
    remove_process_set,
)
from hora.torch._queries import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hora.torch._reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from hora.torch._sparse import (
    sparse_allreduce_async,
)
from hora.torch._state import (
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hora.torch._sync_batch_norm import (
    SyncBatchNorm,
)
from hora.torch._timeline import (
    start_timeline,
    stop_timeline,
)
from hora.torch._track import (
    Tracker,
    track,
)
from hora.torch.checkpoint import (
    Checkpoints,
    Save,
    restore,
    save,
)

__all__ = [
    "Adasum",
    "Average",
    "Checkpoints",
    "Compression",
    "Compressor",
    "Context",
    "DistributedOptimizer",
    "Handle",
    "Loader",
    "Max",
    "Min",
    "PowerSGD",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Save",
    "Share",
    "Sum",
    "SyncBatchNorm",
    "TopK",
    "Tracker",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "context",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "data_loader",
    "ddl_built",
    "device",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mean",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "only",
    "poll",
    "process_set_ids",
    "process_set_included",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "restore",
    "rocm_built",
    "save",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
    "track",
]
