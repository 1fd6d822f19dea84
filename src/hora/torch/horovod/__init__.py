"""Horovod's interface for PyTorch on Hora: what ``import horovod.torch as hvd`` gives under
``hora run --horovod``.

Operations are matched across the ranks by name, whatever the order in which each rank submits them.
Where Horovod's semantics are a choice they are kept; where they are faults they are not (see the guide
"Coming from Horovod").

The names imported here are the public ones; there is no second list of them.
"""

from hora.adapter.negotiation.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
)
from hora.torch._collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
)
from hora.torch._compression import (
    Compression,
)
from hora.torch._process_sets import (
    ProcessSet,
    global_process_set,
    process_set_included,
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
from hora.torch._sync_batch_norm import SyncBatchNorm
from hora.torch.horovod import (
    elastic,
)
from hora.torch.horovod._functions import (
    add_process_set,
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
    get_process_set_ids_and_ranks,
    is_homogeneous,
    join,
    remove_process_set,
    start_timeline,
    stop_timeline,
)
from hora.torch.horovod._operations import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from hora.torch.horovod._optimizer import (
    DistributedOptimizer,
)
from hora.torch.horovod._session import (
    init,
    is_initialized,
    shutdown,
)
from hora.torch.horovod._world import (
    cross_rank,
    cross_size,
    local_rank,
    local_size,
    rank,
    size,
)
