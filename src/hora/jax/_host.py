"""Collectives of a host: arrays of this rank alone go in, and come out.

Reductions run on the device, on flat buffers. What only moves (allgather, broadcast,
alltoall) travels as bytes, so that every dtype arrives bit by bit; lengths are rounded up, so that few
programs serve all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hora.adapter.ops import ReduceOp
from hora.adapter.order import share
from hora.jax._mesh import AXIS, Places, on_host
from hora.jax._reduce import Reduction, grouped, reduce_arrays, scatter_rows, together

__all__ = [
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast_bytes",
    "gather_bytes",
    "reducescatter",
]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK = 64 * 2**20
"""Bytes of one message of a broadcast: enough to be fast, little extra memory."""

SMALLEST = 1024
"""Bytes of the smallest message."""


def allreduce(arrays: Sequence[jax.Array], reduction: Reduction, places: Places) -> list[jax.Array]:
    """Combine each array over the ranks."""
    apart = reduction.op is ReduceOp.Adasum  # which depends on what is one array
    flats = _pack([places.here(array) for array in arrays], apart=apart)

    def body(*rows: jax.Array) -> list[jax.Array]:
        return reduce_arrays([row[0] for row in rows], reduction, axis=AXIS)

    results = places.run(("allreduce", reduction), body, flats)
    return list(_unpack(results, like=tuple((array.shape, array.dtype) for array in arrays), apart=apart))


def reducescatter(
    arrays: Sequence[jax.Array], reduction: Reduction, places: Places, index: int
) -> list[jax.Array]:
    """This rank's rows of each combined array; the first ranks get one more where they do not divide."""
    padded = [_spread(places.here(array), size=places.size) for array in arrays]

    def body(*rows: jax.Array) -> list[jax.Array]:
        return [scatter_rows(row[0], reduction, axis=AXIS) for row in rows]

    results = places.run(("reducescatter", reduction), body, padded, split=True)
    shares = [share(0, array.shape[0], rank=index, size=places.size) for array in arrays]
    return [result[: stop - start] for result, (start, stop) in zip(results, shares, strict=True)]


def gather_bytes(mine: Bytes, lengths: Sequence[int], places: Places) -> list[Bytes]:
    """The bytes of all ranks, whose lengths every rank knows."""
    if max(lengths) == 0:
        return [np.zeros(0, np.uint8) for _ in lengths]
    row = _padded(mine, _rounded(max(lengths)))

    def body(rows: jax.Array) -> list[jax.Array]:
        return [lax.all_gather(rows[0], AXIS)]

    [gathered] = places.run("allgather", body, [row])
    return [each.view(np.uint8)[:length] for each, length in zip(on_host(gathered), lengths, strict=True)]


def broadcast_bytes(mine: Bytes | None, length: int, places: Places) -> Bytes:
    """The bytes of the rank that gives any: a sum of whole numbers, in which the others give zeros."""
    result = np.empty(length, np.uint8)

    def body(rows: jax.Array) -> list[jax.Array]:
        return [lax.psum(rows[0], AXIS)]

    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        part = np.zeros(0, np.uint8) if mine is None else mine[start:stop]
        [summed] = places.run("broadcast", body, [_padded(part, _rounded(stop - start))])
        result[start:stop] = on_host(summed).view(np.uint8)[: stop - start]
    return result


def alltoall(blocks: Sequence[Bytes], lengths: Sequence[int], longest: int, places: Places) -> list[Bytes]:
    """Send each rank its block; those that come, of the given lengths. ``longest`` of all blocks anywhere."""
    if longest == 0:
        return [np.zeros(0, np.uint8) for _ in lengths]
    rows = np.concatenate([_padded(block, _rounded(longest)) for block in blocks])[None]

    def body(each: jax.Array) -> list[jax.Array]:
        swapped = together(lax.all_to_all, each[0], AXIS, split_axis=0, concat_axis=0, tiled=True)
        return [swapped[None]]

    [received] = places.run("alltoall", body, [rows], split=True)
    return [
        block.view(np.uint8)[:length] for block, length in zip(on_host(received)[0], lengths, strict=True)
    ]


def barrier(places: Places) -> None:
    """Wait until every rank has come here."""

    def body(rows: jax.Array) -> list[jax.Array]:
        return [lax.psum(rows[0], AXIS)]

    places.run("barrier", body, [np.zeros((1, 1), np.int32)])


@functools.partial(jax.jit, static_argnames=("apart",))
def _pack(arrays: list[jax.Array], *, apart: bool) -> list[jax.Array]:
    """One row ``(1, n)`` for each group of arrays, or for each array."""
    flat = [array.reshape(1, -1) for array in arrays]
    if apart:
        return flat
    return [
        jnp.concatenate([flat[place] for place in places], axis=1) if len(places) > 1 else flat[places[0]]
        for places in grouped([(array.dtype, array.size) for array in arrays])
    ]


@functools.partial(jax.jit, static_argnames=("like", "apart"))
def _unpack(
    flats: list[jax.Array], *, like: tuple[tuple[tuple[int, ...], Any], ...], apart: bool
) -> list[jax.Array]:
    if apart:
        return [flat.reshape(shape) for flat, (shape, _) in zip(flats, like, strict=True)]
    results: list[Any] = [None] * len(like)
    for flat, places in zip(
        flats, grouped([(dtype, math.prod(shape)) for shape, dtype in like]), strict=True
    ):
        start = 0
        for place in places:
            shape = like[place][0]
            length = math.prod(shape)
            results[place] = flat[start : start + length].reshape(shape)
            start += length
    return results


@functools.partial(jax.jit, static_argnames=("size",))
def _spread(array: jax.Array, *, size: int) -> jax.Array:
    """The rows of each rank one after the other, filled up to equal numbers, as ``(1, rows, ...)``."""
    rows = array.shape[0]
    most = -(-rows // size)
    if rows == most * size:
        return array[None]
    shares = (share(0, rows, rank=index, size=size) for index in range(size))
    chosen = [[min(first + offset, rows - 1) for offset in range(most)] for first, _ in shares]
    return array[np.array(chosen).reshape(-1)][None]


def _rounded(length: int) -> int:
    """A length with at most three leading binary digits: messages grow by an eighth or less... or a
    quarter.
    """
    if length <= SMALLEST:
        return SMALLEST
    step = 1 << (length.bit_length() - 3)
    return -(-length // step) * step


def _padded(data: Bytes, length: int) -> np.ndarray[Any, Any]:
    """The bytes as a row ``(1, words)`` of 32 bits each."""
    row = np.zeros(length, np.uint8)
    row[: len(data)] = data
    return row.view(np.uint32)[None]
