"""``horovod.tensorflow.compression``."""

from __future__ import annotations

from hora.tensorflow._compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
