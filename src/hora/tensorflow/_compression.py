"""Compression of what travels in an allreduce.

A *compressor* changes a tensor to what is reduced, and the result back. ``Compression`` names those that
keep nothing from call to call; they can be given to ``allreduce`` and to ``DistributedGradientTape``.
"""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

__all__ = ["BF16Compressor", "Compressing", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor(Protocol):
    """What the argument ``compression`` takes."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """What to reduce in the place of ``tensor``, and what ``decompress`` needs to know."""
        ...

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The reduced tensor, as ``tensor`` was."""
        ...


Compressing = Any
"""A :class:`Compressor`, or a class whose methods are static, as those of ``Compression`` are."""


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class _Half:
    """Sends wider floating tensors in a dtype of two bytes; others as they are."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        if tensor.dtype.is_floating and tensor.dtype.size > 2:
            return tf.cast(tensor, cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Half):
    """float16: 11 bits of precision, values up to 65504."""

    dtype = tf.float16


class BF16Compressor(_Half):
    """bfloat16: 8 bits of precision, the range of float32."""

    dtype = tf.bfloat16


class Compression:
    """The compressors by name.

    Attributes:
        none: nothing is compressed.
        fp16: floating tensors travel as float16; values above 65504 overflow.
        bf16: floating tensors travel as bfloat16, which has the range of float32 and fewer digits.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
