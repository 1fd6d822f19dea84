"""Horovod's interface for TensorFlow on Hora: what ``import horovod.tensorflow as hvd`` gives under
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
from hora.tensorflow._batch_norm import (
    SyncBatchNormalization,
)
from hora.tensorflow._collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
)
from hora.tensorflow._compression import (
    Compression,
)
from hora.tensorflow._process_sets import (
    ProcessSet,
    global_process_set,
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
from hora.tensorflow.horovod import (
    elastic,
)
from hora.tensorflow.horovod._functions import (
    BroadcastGlobalVariablesHook,
    add_process_set,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    check_num_rank_power_of_2,
    cross_rank,
    cross_size,
    get_process_set_ids_and_ranks,
    handle_average_backwards_compatibility,
    is_homogeneous,
    join,
    local_rank,
    local_size,
    process_set_included,
    rank,
    remove_process_set,
    size,
    start_timeline,
    stop_timeline,
)
from hora.tensorflow.horovod._operations import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    PartialDistributedOptimizer,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from hora.tensorflow.horovod._session import (
    init,
    is_initialized,
    shutdown,
)
