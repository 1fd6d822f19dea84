"""Batch normalization by the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from hora.keras._backend import api

__all__ = ["SyncBatchNormalization", "moments"]


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
        return moments(self, inputs, mask)


def moments(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """Mean and variance of the inputs of all ranks, for a layer of batch normalization."""
    axes = layer._reduction_axes
    weights = ops.ones_like(ops.mean(inputs, axis=layer.axis, keepdims=True))
    if mask is not None:
        weights = weights * ops.expand_dims(ops.cast(mask, inputs.dtype), layer.axis)
    count = ops.sum(weights)
    summed = ops.sum(inputs * weights, axis=axes)
    totals = _summed(layer, ops.concatenate([summed, ops.reshape(count, (1,))]))
    total = ops.maximum(totals[-1], 1)
    mean = totals[:-1] / total
    shape = [1] * len(inputs.shape)
    shape[layer.axis] = mean.shape[0]
    # From the mean of all, not as a difference of large squares.
    squares = ops.sum(ops.square(inputs - ops.reshape(mean, shape)) * weights, axis=axes)
    return mean, _summed(layer, squares) / total


def _summed(layer: Any, value: Any) -> Any:
    return api.allreduce(value, op=api.Sum, name=f"{layer.name}.statistics")
