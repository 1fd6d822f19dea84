"""Fingerprints of arrays: equal for equal bits, and cheap enough to take while a training runs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCKS", "MOST", "SAMPLE", "combined", "digest", "is_due", "sample"]

EVERY = 50
"""After steps 1, 2, 4, 8, 16 and 32 there is a fingerprint every so many steps."""

MOST = 1000
"""Tensors whose fingerprints are reported one by one."""

BLOCKS = 64
"""Blocks of a large tensor, each of which is folded to the sum of its 64-bit words. That runs at the speed of
memory, where a checksum of all bytes takes about ten times as long."""

SAMPLE = 4096
"""Elements of a large input that are looked at."""


def is_due(steps: int) -> bool:
    """Whether there is a fingerprint after so many steps."""
    return steps > 0 and (steps % EVERY == 0 or (steps < EVERY and steps & (steps - 1) == 0))


def digest(array: NDArray[Any]) -> int:
    """A number: different for different bits, but for chance."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = len(data) - len(data) % (8 * BLOCKS)
    words = data[:whole].view(np.uint64).reshape(BLOCKS, -1).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[whole:].tobytes(), zlib.crc32(words.tobytes()))


def sample(array: NDArray[Any]) -> int:
    """A number for what a model is fed: of a large array, some elements and the shape."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.hasobject:  # TensorFlow's strings
        flat = np.array([str(each) for each in flat[: SAMPLE // 64]])
    if len(flat) > SAMPLE:
        flat = flat[:: len(flat) // SAMPLE]
    return zlib.crc32(str(np.shape(array)).encode(), digest(flat))


def combined(numbers: Sequence[int | float]) -> str:
    """One word for a list of numbers."""
    text = ",".join(map(str, numbers))
    return blake2b(text.encode(), digest_size=8).hexdigest()
