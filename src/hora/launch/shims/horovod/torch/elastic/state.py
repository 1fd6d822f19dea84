"""``horovod.torch.elastic.state``."""

from __future__ import annotations

from hora.torch.horovod.elastic import ObjectState, State, TorchState

__all__ = ["ObjectState", "State", "TorchState"]
