"""Random augmentation as a pure function of (seed, epoch, sample): never of the number of workers.

No generator is kept anywhere. Each number is a hash of what it belongs to, so a sample is augmented the
same whichever worker reads it, and whether or not the training was interrupted before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["flip_and_shift", "uniform"]


def uniform(samples: NDArray[np.int64], *, seed: int, epoch: int, draws: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), of shape [len(samples), draws].

    The hash is the finalizer of SplitMix64 (G. Steele et al., "Fast Splittable Pseudorandom Number
    Generators", OOPSLA 2014), applied once for each of seed, epoch, sample and draw.
    """
    state = _mix(np.array([seed], dtype=np.int64).astype(np.uint64))
    state = _mix(state ^ np.uint64(epoch))
    each = _mix(state ^ np.asarray(samples, dtype=np.int64).astype(np.uint64))
    words = _mix(each[:, None] ^ np.arange(draws, dtype=np.uint64)[None, :])
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def flip_and_shift(
    images: NDArray[np.uint8], samples: NDArray[np.int64], *, shift: int, seed: int, epoch: int
) -> NDArray[np.uint8]:
    """Mirror half of the images, and move each by up to ``shift`` pixels each way; zeros come in.

    Args:
        images: [n, height, width].
        samples: [n], the sample number of each image.
        shift: pixels; 0 only mirrors.
        seed: of the run.
        epoch: from 0.
    """
    draws = uniform(samples, seed=seed, epoch=epoch, draws=3)
    rows, columns = images.shape[1:]
    down, right = (np.floor(draws[:, 1:] * (2 * shift + 1)).astype(np.int64)).T
    row_index = down[:, None] + np.arange(rows)
    column_index = right[:, None] + np.arange(columns)
    mirrored = draws[:, 0] < 0.5
    # Mirroring reverses the order in which the columns of the padded image are read.
    column_index[mirrored] = column_index[mirrored, ::-1]
    padded: NDArray[np.uint8] = np.pad(images, ((0, 0), (shift, shift), (shift, shift)))
    each = np.arange(len(images))[:, None, None]
    result: NDArray[np.uint8] = padded[each, row_index[:, :, None], column_index[:, None, :]]
    return result


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)  # wraps around, as it should
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
