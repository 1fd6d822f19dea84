"""``horovod.tensorflow.mpi_ops``: the operations and queries."""

from hora.tensorflow.horovod import *
from hora.tensorflow.horovod import allreduce as _allreduce

from ..common.util import gpu_available
