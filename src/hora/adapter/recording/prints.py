"""Short numbers and names for arrays, so that two runs can be compared without keeping their arrays."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hora.core.recording import SKETCH, rounding

__all__ = ["digests_of_rows", "fingerprint", "norm_of", "row_digests", "together", "unfounded"]

Array = NDArray[Any]

_WIDTH = 4096


def fingerprint(array: Array) -> list[float]:
    """``[norm, projections...]``: random projections in float64, the same for every array of this length.

    The signs are a product of one sign for the place inside a block of 4096 elements and one for the block
    (Alon, Matias, Szegedy 1999, applied to both indices), so that no large matrix of signs is needed.
    """
    flat = np.asarray(array).reshape(-1).astype(np.float64)
    blocks, rest = divmod(flat.size, _WIDTH)
    # A longer table of signs for blocks begins as a shorter one does.
    inner, outer = _signs(1, _WIDTH), _signs(2, 1 << blocks.bit_length())
    total = flat[blocks * _WIDTH :] @ inner[:rest] * outer[blocks]
    if blocks:
        total = total + (flat[: blocks * _WIDTH].reshape(blocks, _WIDTH) @ inner * outer[:blocks]).sum(0)
    return [math.sqrt(float(flat @ flat)), *total.tolist()]


@functools.cache
def _signs(seed: int, count: int) -> Array:
    bits = np.random.default_rng(seed).integers(0, 2, (count, SKETCH))
    return (bits * 2 - 1).astype(np.float64)


def row_digests(array: Array) -> list[str]:
    """A digest per row of the first dimension."""
    return digests_of_rows([array])


def digests_of_rows(arrays: Sequence[Array]) -> list[str]:
    """A digest per sample: of what the arrays have in its row; those of other lengths than the first's stay
    out of it.
    """
    tables = [_table(np.asarray(array)) for array in arrays if np.ndim(array)]
    if not tables:
        return []
    rows = len(tables[0])
    tables = [table for table in tables if len(table) == rows]
    if not any(table.size for table in tables):
        return ["empty"] * rows
    return [
        hashlib.blake2b(b"".join(table[row].tobytes() for table in tables), digest_size=8).hexdigest()
        for row in range(rows)
    ]


def _table(array: Array) -> Array:
    """The bytes of each row."""
    if array.dtype == object:  # words
        array = array.astype(str)
    plain = np.ascontiguousarray(array)
    return (
        plain.reshape(-1).view(np.uint8).reshape(len(plain), -1) if plain.size else np.empty((len(plain), 0))
    )


def norm_of(array: Array) -> float:
    """The norm of all elements, in float64."""
    return float(np.linalg.norm(np.asarray(array, dtype=np.float64).reshape(-1)))


def together(norms: Iterable[float]) -> float:
    """The norm of several arrays, of their norms."""
    return float(sum(norm * norm for norm in norms) ** 0.5)


def unfounded(before: Array, now: Array, gradient: Array, norm: float) -> float:
    """Norm of the change where the gradient is rounding, which Adam blows up to full steps.

    Args:
        before: the parameter.
        now: the same after the step.
        gradient: of it.
        norm: of all gradients together.
    """
    limit = rounding(str(now.dtype)) * norm
    silent = np.abs(gradient.astype(np.float64)) <= limit
    return float(np.linalg.norm((now.astype(np.float64) - before.astype(np.float64))[silent]))
