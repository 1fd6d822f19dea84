"""``import horovod.tensorflow as hvd``."""

from hora.tensorflow.horovod import *

from ..common.util import check_extension
from . import compression, functions, mpi_ops, sync_batch_norm, util
from .elastic import run as _run  # importing it makes `elastic` this package's own module
