"""In which dtype a reduction runs, and how its factors are applied."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hora.adapter.ops import ReduceOp

__all__ = ["is_reducible", "narrowed", "reduced_in", "scaled_by", "widened"]

_ENGINE = frozenset((tf.float32, tf.float64, tf.int32, tf.int64))
"""What the engine combines as it is; half precision too, and then each sum is rounded."""

_ORDERED = (ReduceOp.Min, ReduceOp.Max)

_SIGN = -(2**63)
"""Flipped, it makes the order of signed integers that of unsigned ones."""


def is_reducible(dtype: tf.DType) -> bool:
    """Whether tensors of this dtype can be combined at all."""
    return bool(dtype.is_floating or dtype.is_complex or dtype.is_integer or dtype is tf.bool)


def reduced_in(dtype: tf.DType, op: ReduceOp, *, narrow: bool = False) -> tf.DType:
    """The dtype in which a tensor of ``dtype`` is reduced by ``op``.

    Half precision is reduced in float32 and rounded once. Small integers are reduced in int32 and wrap when
    they are made small again; bool follows as 0 and 1.
    """
    if dtype in _ENGINE or dtype.is_complex or (narrow and dtype in (tf.float16, tf.bfloat16)):
        return dtype
    if dtype.is_floating:
        return tf.float32
    return tf.int64 if dtype in (tf.uint32, tf.uint64) else tf.int32


def widened(tensor: Any, dtype: tf.DType, op: ReduceOp) -> Any:
    """The tensor as ``dtype``, to be reduced by ``op``."""
    if tensor.dtype is tf.uint64:
        signed = tf.bitcast(tensor, tf.int64)  # sums and products are the same modulo 2**64
        return tf.bitwise.bitwise_xor(signed, tf.constant(_SIGN, tf.int64)) if op in _ORDERED else signed
    return tensor if tensor.dtype is dtype else tf.cast(tensor, dtype)


def narrowed(tensor: Any, dtype: tf.DType, op: ReduceOp) -> Any:
    """What :func:`widened` made, back as ``dtype``."""
    if tensor.dtype is dtype:
        return tensor
    if dtype is tf.uint64:
        signed = tf.bitwise.bitwise_xor(tensor, tf.constant(_SIGN, tf.int64)) if op in _ORDERED else tensor
        return tf.bitcast(signed, tf.uint64)
    return tf.cast(tensor, dtype)


def scaled_by(tensor: Any, factor: float, *, like: tf.DType) -> Any:
    """``tensor * factor``: integers by way of float64, towards zero.

    Args:
        tensor: widened.
        factor: 1 changes nothing.
        like: the dtype that the user gave; integers take its range.
    """
    if factor == 1.0:
        return tensor
    if like.is_floating or like.is_complex:
        return tensor * factor
    return tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)
