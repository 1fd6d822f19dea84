"""``horovod.torch.optimizer``."""

from __future__ import annotations

from hora.torch.horovod import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
