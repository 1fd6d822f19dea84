"""``horovod.torch.mpi_ops``: the operations and queries."""

from hora.torch.horovod import *
from hora.torch.horovod._backwards import (
    handle_average_backwards_compatibility,
    num_rank_is_power_2,
)

from ..common.util import gpu_available
