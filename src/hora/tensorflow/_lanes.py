"""Tensors of any dtype as flat tensors of the few that the engine moves."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["from_lanes", "lane_count", "to_lanes"]

MOVED = frozenset((tf.float16, tf.float32, tf.float64, tf.int32, tf.int64))
"""What the engine gathers, swaps and broadcasts itself."""

_ALIKE = {4: tf.int32, 8: tf.int64}
"""By size: the dtype as which others travel, bit by bit."""

LANE = 4
"""Bytes of a lane of smaller dtypes."""


def lane_count(elements: int, dtype: tf.DType) -> int:
    """Elements of the flat tensor that stands for so many of this dtype."""
    if dtype in MOVED or dtype.size in _ALIKE:
        return elements
    if dtype.size == 16:
        return 2 * elements
    return -(-elements * int(dtype.size) // LANE)


def to_lanes(tensor: Any) -> Any:
    """A tensor as a flat one of a dtype that the engine moves, all bits kept."""
    flat = tf.reshape(tensor, [-1])
    dtype = flat.dtype
    if dtype in MOVED:
        return flat
    if dtype.size in _ALIKE:
        return tf.bitcast(flat, _ALIKE[dtype.size])
    if dtype.size == 16:
        return tf.reshape(tf.bitcast(flat, tf.int64), [-1])
    small = tf.cast(flat, tf.uint8) if dtype is tf.bool else tf.reshape(tf.bitcast(flat, tf.uint8), [-1])
    missing = -int(small.shape[0]) % LANE
    return tf.bitcast(tf.reshape(tf.pad(small, [[0, missing]]), [-1, LANE]), tf.int32)


def from_lanes(lanes: Any, elements: int, dtype: tf.DType) -> Any:
    """The first elements of a flat tensor that :func:`to_lanes` made."""
    if dtype in MOVED:
        return lanes[:elements]
    if dtype.size in _ALIKE:
        return tf.bitcast(lanes[:elements], dtype)
    if dtype.size == 16:
        return tf.bitcast(tf.reshape(lanes[: 2 * elements], [-1, 2]), dtype)
    small = tf.reshape(tf.bitcast(lanes, tf.uint8), [-1])[: elements * dtype.size]
    if dtype is tf.bool:
        return tf.cast(small, tf.bool)
    if dtype.size == 1:
        return tf.bitcast(small, dtype)
    return tf.bitcast(tf.reshape(small, [-1, dtype.size]), dtype)
