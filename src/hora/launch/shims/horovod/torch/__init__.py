"""``import horovod.torch as hvd``."""

from __future__ import annotations

from typing import Any

from hora.torch.horovod import *  # noqa: F403
from hora.torch.horovod import __all__ as _names

from ..common.util import check_extension as check_extension  # noqa: TID252 - mypy knows it by another name

__all__ = [*_names, "SyncBatchNorm", "check_extension"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNorm":
        from .sync_batch_norm import SyncBatchNorm

        return SyncBatchNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
