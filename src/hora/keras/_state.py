"""The state of a training on the backends whose jobs start anew when a worker is lost."""

from __future__ import annotations

from typing import Any

from hora.adapter import elastic
from hora.adapter.elastic import run
from hora.keras import _backend

__all__ = ["ObjectState", "run"]


class ObjectState(elastic.ObjectState):
    """Plain values, given to all ranks by the backend's collectives."""

    @staticmethod
    def _api() -> Any:
        return _backend.api
