"""Adasum: a sum that adapts to how far the ranks' tensors point the same way.

Of two vectors ``a`` and ``b`` it makes

    (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b

so that orthogonal vectors are added, and equal ones averaged. More ranks are combined as a binary tree:
neighbours first, then pairs of pairs. (Maleki et al., "Scaling Distributed Training with Adaptive
Summation", arXiv:2006.02924, equation 2 and section 4.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hora.core.errors import CollectiveError
from hora.tensorflow._engine import Carrier, Group

__all__ = ["NotOfAdasumError", "adasum", "check_adasum", "combine"]


class NotOfAdasumError(CollectiveError, NotImplementedError):
    """What Adasum is not defined for; scripts for Horovod expect a ``NotImplementedError``."""

    slug = "collective"


def combine(a: Any, b: Any) -> Any:
    """Adasum of two vectors; dot products in float64. A vector of zeros counts for nothing."""
    wide_a, wide_b = tf.cast(a, tf.float64), tf.cast(b, tf.float64)
    dot, norm_a, norm_b = (
        float(tf.reduce_sum(x * y)) for x, y in ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b))
    )
    factor_a = 1 - dot / (2 * norm_a) if norm_a > 0 else 1.0
    factor_b = 1 - dot / (2 * norm_b) if norm_b > 0 else 1.0
    return a * factor_a + b * factor_b


def check_adasum(dtype: tf.DType, size: int, *, function: str) -> None:
    """Raise CollectiveError where Adasum has no meaning."""
    if not dtype.is_floating:
        raise CollectiveError(
            f"{function} has no Adasum of {dtype.name} tensors.",
            fix="Write op=hora.Sum, or convert with tf.cast(tensor, tf.float32).",
        )
    if size & (size - 1):
        raise NotOfAdasumError(
            f"{function}: Adasum combines ranks in pairs, which {size} ranks do not allow.",
            fix="Start 2, 4, 8, ... workers, or write op=hora.Average.",
        )


def adasum(flat: Any, lengths: Sequence[int], engine: Carrier, group: Group) -> Any:
    """Adasum over the group of each part of a flat tensor by itself.

    All ranks gather all vectors and combine them in the same order, so that they end with the same bits.
    """
    gathered = engine.gather(flat, group) if group.size > 1 else flat[None]
    vectors = [tf.split(gathered[member], list(lengths)) for member in range(group.size)]
    while len(vectors) > 1:
        vectors = [
            [combine(a, b) for a, b in zip(first, second, strict=True)]
            for first, second in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return tf.concat(vectors[0], 0)
