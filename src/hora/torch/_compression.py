"""Compression of what travels in an allreduce.

A *compressor* changes a tensor to what is reduced, and the result back. ``Compression`` names those that
keep nothing from call to call; they can be given to ``allreduce`` and to ``DistributedOptimizer``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Compression", "Compressor"]


class Compressor(Protocol):
    """What the argument ``compression`` takes."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What to reduce in the place of ``tensor``, and what ``decompress`` needs to know."""
        ...

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor, as ``tensor`` was."""
        ...


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Half:
    """Sends wider floating tensors in a dtype of two bytes; others as they are."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype.is_floating_point and tensor.element_size() > 2:
            return tensor.to(cls.dtype), tensor.dtype
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Half):
    """float16: 11 bits of precision, values up to 65504."""

    dtype = torch.float16


class BF16Compressor(_Half):
    """bfloat16: 8 bits of precision, the range of float32."""

    dtype = torch.bfloat16


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
