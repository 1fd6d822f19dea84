"""``import horovod.torch as hvd``."""

from hora.torch.horovod import *

from ..common.util import check_extension
from . import compression, functions, mpi_ops, optimizer, sync_batch_norm
from .elastic import run as _run  # importing it makes `elastic` the package, with its modules
