"""Trainings that survive the end of a worker: a state that is committed, and callbacks that do it.

::

    hora.init()
    model = ...; model.compile(hora.DistributedOptimizer(...), ...)
    state = hora.elastic.KerasState(model, batch=0, epoch=0)

    @hora.elastic.run
    def train(state):
        model.fit(data, epochs=10, initial_epoch=state.epoch, callbacks=[
            hora.callbacks.UpdateBatchStateCallback(state),
            hora.callbacks.UpdateEpochStateCallback(state),
            hora.callbacks.CommitStateCallback(state, batches_per_commit=100),
        ])

    train(state)

``hora run --restarts 3`` starts the job anew after a failure, and it goes on from the last commit, which is
in the run directory. On PyTorch, ``hora run --min-workers 1`` keeps the workers that live, as for
``hora.torch.elastic``.
"""

from __future__ import annotations

from hora.keras._backend import engine
from hora.keras._keras_state import KerasState
from hora.keras.callbacks._state import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

run = engine.run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
