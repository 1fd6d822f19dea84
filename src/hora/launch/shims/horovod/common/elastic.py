"""``horovod.common.elastic``: a state of the user's own, and ``run``."""

from __future__ import annotations

from ._face import face

__all__ = ["ObjectState", "State", "run"]

_elastic = face().elastic
ObjectState, State, run = _elastic.ObjectState, _elastic.State, _elastic.run
