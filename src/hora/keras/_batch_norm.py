"""Batch normalization by the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from hora.keras._backend import api

__all__ = ["SyncBatchNormalization"]


@keras.saving.register_keras_serializable("hora")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc] # Keras has no types
    """``keras.layers.BatchNormalization`` whose mean and variance in training are those of the global batch.

    So a model with it trains as on one worker, and its moving statistics are the same on every rank. The
    plain layer normalizes by each rank's own batch. Two small messages per layer and step, forward and
    backward. In inference, and with one worker, it is the plain layer.

    Args:
        args: as those of ``keras.layers.BatchNormalization``.
        options: as those of ``keras.layers.BatchNormalization``, without ``synchronized``.
    """

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        if not api.is_initialized() or api.size() == 1:
            return super()._moments(inputs, mask)  # type: ignore[no-any-return]
        axes = self._reduction_axes
        weights = ops.ones_like(ops.mean(inputs, axis=self.axis, keepdims=True))
        if mask is not None:
            weights = weights * ops.expand_dims(ops.cast(mask, inputs.dtype), self.axis)
        count = ops.sum(weights)
        summed = ops.sum(inputs * weights, axis=axes)
        totals = self._summed(ops.concatenate([summed, ops.reshape(count, (1,))]))
        total = ops.maximum(totals[-1], 1)
        mean = totals[:-1] / total
        shape = [1] * len(inputs.shape)
        shape[self.axis] = mean.shape[0]
        # From the mean of all, not as a difference of large squares.
        squares = ops.sum(ops.square(inputs - ops.reshape(mean, shape)) * weights, axis=axes)
        return mean, self._summed(squares) / total

    def _summed(self, value: Any) -> Any:
        return api.allreduce(value, op=api.Sum, name=f"{self.name}.statistics")
