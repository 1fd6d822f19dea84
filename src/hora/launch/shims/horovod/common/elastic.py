"""``horovod.common.elastic``: the names, which say that the elastic engine is yet to come."""

from __future__ import annotations

from hora.torch.horovod.elastic import ObjectState, State, run

__all__ = ["ObjectState", "State", "run"]
