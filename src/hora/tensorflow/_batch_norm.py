"""Batch norm whose statistics are those of all ranks' batches together."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hora.tensorflow._autograph import unconverted
from hora.tensorflow._collectives import Sum, grouped_allreduce
from hora.tensorflow._context import required
from hora.tensorflow._process_sets import ProcessSet, global_process_set

__all__ = ["SyncBatchNormalization"]


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch norm over the union of the ranks' batches: ``tf.keras.layers.BatchNormalization`` otherwise.

    While training it gives what one worker gives with the union batch. Local batches may differ in size.
    Gradients of its variables are this rank's own, which the distributed tape or optimizer averages as all
    others. In inference it is plain batch norm.

    Args:
        fused: accepted for scripts written for Horovod; only False.
        process_set: the ranks whose batches count; only they call.
        kwargs: those of ``BatchNormalization``.
    """

    def __init__(
        self, fused: bool = False, process_set: ProcessSet = global_process_set, **kwargs: Any
    ) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)
        self._process_set = process_set

    @unconverted
    def _moments(self, inputs: Any, mask: Any) -> Any:
        size = len(self._process_set.members) if required("SyncBatchNormalization") else 1
        if size == 1:
            return super()._moments(inputs, mask)
        axes = list(self._reduction_axes)
        wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < 4 else inputs
        weights = tf.ones_like(wide)
        if mask is not None:
            shown = tf.cast(tf.reshape(mask, [*tf.unstack(tf.shape(mask)), 1]), wide.dtype)
            weights = weights * shown
        count = tf.cast(tf.reduce_sum(weights, axes), tf.float64)
        safe = tf.maximum(count, 1.0)
        mean = tf.cast(tf.reduce_sum(wide * weights, axes, keepdims=True), tf.float64)
        mean = mean / tf.reshape(safe, tf.shape(mean))
        far = tf.square(wide - tf.cast(mean, wide.dtype)) * weights
        variance = tf.cast(tf.reduce_sum(far, axes), tf.float64) / safe
        mean = tf.reshape(mean, tf.shape(count))
        # In float64: the mean of the squares is near the square of the mean.
        total, first, second = grouped_allreduce(
            [count, count * mean, count * (variance + tf.square(mean))],
            op=Sum,
            process_set=self._process_set,
        )
        total = tf.maximum(total, 1.0)
        mean = first / total
        variance = tf.maximum(second / total - tf.square(mean), 0.0)
        return tf.cast(mean, wide.dtype), tf.cast(variance, wide.dtype)
