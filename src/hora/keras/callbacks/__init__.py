"""Callbacks for ``model.fit`` on several ranks. Give the same on every rank, in the same order.

``MetricAverageCallback`` comes before those that look at metrics: ``EarlyStopping``, ``ReduceLROnPlateau``,
``ModelCheckpoint``, :class:`BestModelCheckpoint`.
"""

from __future__ import annotations

from hora.keras.callbacks._best import BestModelCheckpoint
from hora.keras.callbacks._broadcast import BroadcastGlobalVariablesCallback
from hora.keras.callbacks._metrics import MetricAverageCallback
from hora.keras.callbacks._rates import LearningRateScheduleCallback, LearningRateWarmupCallback
from hora.keras.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]
