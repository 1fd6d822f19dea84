"""``horovod.common.exceptions``."""

from __future__ import annotations

from hora.torch.horovod import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]
