"""Horovod's elastic names for Keras: ``horovod.keras.elastic``, ``horovod.tensorflow.keras.elastic``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from hora.keras import elastic
from hora.keras._backend import BACKEND
from hora.keras.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(elastic.KerasState):
    """:class:`hora.keras.elastic.KerasState`, with Horovod's arguments.

    Args:
        model: a compiled model.
        optimizer: its optimizer; by default that of ``compile``.
        backend: accepted for compatibility.
        kwargs: plain values by name, such as ``batch=0, epoch=0``.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``func(state, ...)``. On TensorFlow, anew with the state of the last commit after an error of
    Horovod's; when a worker has ended, ``hora run --restarts`` starts the job anew.
    """
    if BACKEND == "tensorflow":
        made: Any = importlib.import_module("hora.tensorflow.horovod.elastic").run(func)
    else:
        made = elastic.run(func)
    return made  # type: ignore[no-any-return]
