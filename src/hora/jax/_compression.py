"""Compression of what travels in a reduction.

A *compressor* changes an array to what is reduced, and the result back. It works on the arrays of a host and
inside ``jit`` alike.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp

__all__ = ["Compression", "Compressor"]


class Compressor(Protocol):
    """What the argument ``compression`` takes."""

    def compress(self, array: jax.Array) -> tuple[jax.Array, Any]:
        """What to reduce in the place of ``array``, and what ``decompress`` needs to know."""
        ...

    def decompress(self, array: jax.Array, ctx: Any) -> jax.Array:
        """The reduced array, as ``array`` was."""
        ...


class NoneCompressor:
    """Sends arrays as they are."""

    @staticmethod
    def compress(array: jax.Array) -> tuple[jax.Array, Any]:
        return array, None

    @staticmethod
    def decompress(array: jax.Array, ctx: Any) -> jax.Array:
        return array


class _Half:
    """Sends wider floating arrays in a dtype of two bytes; others as they are."""

    dtype: Any

    @classmethod
    def compress(cls, array: jax.Array) -> tuple[jax.Array, Any]:
        if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 2:
            return array.astype(cls.dtype), array.dtype
        return array, None

    @staticmethod
    def decompress(array: jax.Array, ctx: Any) -> jax.Array:
        return array if ctx is None else array.astype(ctx)


class FP16Compressor(_Half):
    """float16: 11 bits of precision, values up to 65504."""

    dtype = jnp.float16


class BF16Compressor(_Half):
    """bfloat16: 8 bits of precision, the range of float32."""

    dtype = jnp.bfloat16


class Compression:
    """The compressors by name.

    Attributes:
        none: nothing is compressed.
        fp16: floating arrays travel as float16; values above 65504 overflow.
        bf16: floating arrays travel as bfloat16, which has the range of float32 and fewer digits.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
