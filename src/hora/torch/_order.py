"""The order of samples: a pure function of seed, epoch and position.

No generator of numpy or torch takes part, so the order stays the same with every version of them and
with every number of workers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["epoch_order", "sample_seed"]

# splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; these
# constants are those of Vigna's public-domain splitmix64.c (variant 13 of Stafford's mixers).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def epoch_order(count: int, *, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    """The sample at each position of an epoch: int64 of shape ``(count,)``, a permutation.

    Samples are sorted by a 64-bit hash of (seed, epoch, sample). The hash is one-to-one in the sample,
    so there are no ties.
    """
    if not shuffle:
        return np.arange(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        keys = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(_stream(seed, epoch))
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(_MIX_1)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(_MIX_2)
        keys ^= keys >> np.uint64(31)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def sample_seed(*, seed: int, epoch: int, position: int) -> int:
    """A seed of 64 bits for what is random in the sample at this position: crops, flips, noise."""
    return _mix(_stream(seed, epoch) ^ _mix(position + _GOLDEN))


def _stream(seed: int, epoch: int) -> int:
    return _mix(_mix(seed + _GOLDEN) + epoch * _GOLDEN)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)
