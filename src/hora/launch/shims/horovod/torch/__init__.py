"""``import horovod.torch as hvd``."""

from __future__ import annotations

from hora.torch.horovod import *  # noqa: F403
from hora.torch.horovod import __all__ as _names

from ..common.util import check_extension
from . import compression, functions, mpi_ops, optimizer, sync_batch_norm
from .sync_batch_norm import SyncBatchNorm

__all__ = [  # noqa: PLE0604
    *_names,
    "SyncBatchNorm",
    "check_extension",
    "compression",
    "functions",
    "mpi_ops",
    "optimizer",
    "sync_batch_norm",
]
