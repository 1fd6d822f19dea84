"""``horovod.torch.sync_batch_norm``."""

from __future__ import annotations

from hora.torch.horovod import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
