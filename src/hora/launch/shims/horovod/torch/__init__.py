"""``import horovod.torch as hvd``."""

from __future__ import annotations

from hora.torch.horovod import *  # noqa: F403
from hora.torch.horovod import __all__ as _names

from ..common.util import check_extension
from .sync_batch_norm import SyncBatchNorm

__all__ = [*_names, "SyncBatchNorm", "check_extension"]  # noqa: PLE0604
