"""How arrays are combined over a mesh axis: what runs inside ``shard_map``, for a host's calls and a user's.

Small arrays of one dtype travel in one flat buffer, as XLA does not combine all-reduces on the CPU: 100
arrays of 4 KB take 114 ms one by one, and 1.1 ms in one buffer. Large ones travel alone, while others are
still computed: put into the buffer, those of a small convolutional network made its step 1.6 times as long.
Half precision is added up in float32 and rounded once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hora.adapter.fusion import plan
from hora.adapter.ops import ReduceOp

__all__ = ["Reduction", "grouped", "members_only", "reduce_arrays", "scatter_rows", "varies", "vary"]


LARGE = 256 * 1024
"""Bytes of an array that travels alone: sending it takes long beside what each message costs."""


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """What a reduction does; hashable, so that programs are kept by it.

    Attributes:
        op: how arrays are combined.
        prescale: factor applied before.
        postscale: factor applied after.
        narrow: whether half precision is added up in half precision: the compressors' way.
    """

    op: ReduceOp = ReduceOp.Average
    prescale: float = 1.0
    postscale: float = 1.0
    narrow: bool = False


def wide(dtype: Any, reduction: Reduction) -> Any:
    """The dtype in which a dtype is reduced."""
    if dtype == jnp.bool_:
        return jnp.dtype(jnp.int32)
    if dtype.itemsize == 2 and jnp.issubdtype(dtype, jnp.integer):  # the engines have none of 16 bits
        return jnp.dtype(jnp.int32 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint32)
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 and not reduction.narrow:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(dtype)


def reduce_arrays(
    arrays: Sequence[jax.Array],
    reduction: Reduction,
    *,
    axis: str,
    members: Sequence[int] | None = None,
) -> list[jax.Array]:
    """Combine each array over the axis.

    Args:
        arrays: this rank's, inside ``shard_map``.
        reduction: how.
        axis: name of the mesh axis.
        members: places on the axis that take part; the others get their own arrays back. None: all.
    """
    size = lax.axis_size(axis) if members is None else len(members)
    if size == 1 and members is None:
        return [_scaled(array, reduction, size) for array in arrays]
    results: list[Any] = [None] * len(arrays)
    for places in grouped([(array.dtype, array.size) for array in arrays]):
        dtype = arrays[places[0]].dtype
        flat = _join([arrays[place] for place in places]).astype(wide(dtype, reduction))
        flat = _factor(flat, reduction.prescale)
        lengths = [arrays[place].size for place in places]
        combined = _combine(flat, reduction.op, axis, members, lengths)
        if reduction.op is ReduceOp.Average:
            combined = combined / jnp.asarray(size, combined.dtype)
        combined = _factor(combined, reduction.postscale)
        combined = combined.astype(dtype)
        if members is not None:
            combined = jnp.where(members_only(members, axis), combined, _join([arrays[p] for p in places]))
        start = 0
        for place, length in zip(places, lengths, strict=True):
            results[place] = lax.slice(combined, (start,), (start + length,)).reshape(arrays[place].shape)
            start += length
    return results


def grouped(arrays: Sequence[tuple[Any, int]]) -> list[list[int]]:
    """Places of the arrays that travel together, given their dtypes and numbers of elements."""
    sizes = [(np.dtype(dtype), elements, elements * np.dtype(dtype).itemsize) for dtype, elements in arrays]
    small = [place for place, (_, _, size) in enumerate(sizes) if size < LARGE]
    alone = [[place] for place, (_, _, size) in enumerate(sizes) if size >= LARGE]
    return [
        *alone,
        *([small[place] for place in one.tensors] for one in plan([sizes[place] for place in small])),
    ]


def scatter_rows(array: jax.Array, reduction: Reduction, *, axis: str) -> jax.Array:
    """This rank's rows of the arrays combined over the axis; the rows divide evenly.

    An all-to-all and a local sum, not XLA's reduce-scatter: that one fails on the CPU when a rank comes 30 s
    later than another (jax#40831), whatever the timeout that was asked for.
    """
    size = lax.axis_size(axis)
    dtype = array.dtype
    blocks = array.reshape(size, array.shape[0] // size, *array.shape[1:])
    blocks = _factor(blocks.astype(wide(dtype, reduction)), reduction.prescale)
    if size > 1:
        blocks = together(lax.all_to_all, blocks, axis, split_axis=0, concat_axis=0, tiled=True)
    combined = _FOLD[reduction.op](blocks)
    if reduction.op is ReduceOp.Average:
        combined = combined / jnp.asarray(size, combined.dtype)
    return _factor(combined, reduction.postscale).astype(dtype)


def together(operation: Callable[..., jax.Array], array: jax.Array, axis: str, **options: Any) -> jax.Array:
    """Run an operation that does not wait long for late ranks, behind a tiny sum that does."""
    token = lax.psum(vary(jnp.zeros((), jnp.float32), axis), axis)
    array, _ = lax.optimization_barrier((array, token))
    return operation(array, axis, **options)


def members_only(members: Sequence[int], axis: str) -> jax.Array:
    """Whether this rank is one of the members, as a scalar of bool."""
    index = lax.axis_index(axis)
    return jnp.any(jnp.asarray(list(members), index.dtype) == index)


def varies(array: Any, axis: str) -> bool:
    """Whether JAX knows that an array differs between the ranks: under ``check_vma=True`` only."""
    try:
        lax.pcast(array, axis, to="varying")
    except ValueError:
        return True
    return False


def vary(array: Any, axis: str) -> Any:
    """The array, as one that may differ between the ranks."""
    return array if varies(array, axis) else lax.pcast(array, axis, to="varying")


def _combine(
    flat: jax.Array, op: ReduceOp, axis: str, members: Sequence[int] | None, lengths: Sequence[int]
) -> jax.Array:
    flat = vary(flat, axis)
    if flat.size == 0:
        return flat
    if op in (ReduceOp.Product, ReduceOp.Adasum):
        rows = lax.all_gather(flat, axis)
        if members is not None:
            rows = rows[jnp.asarray(list(members))]
        if op is ReduceOp.Product:
            return jnp.prod(rows, axis=0, dtype=flat.dtype)
        return _adasum_rows(rows, lengths)
    if members is not None:
        flat = jnp.where(members_only(members, axis), flat, _neutral(op, flat.dtype))
    if op is ReduceOp.Min:
        return lax.pmin(flat, axis)
    if op is ReduceOp.Max:
        return lax.pmax(flat, axis)
    return lax.psum(flat, axis)


def _neutral(op: ReduceOp, dtype: Any) -> jax.Array:
    """What changes nothing: -0.0 for a sum, as 0.0 would change the sign of -0.0."""
    if op not in (ReduceOp.Min, ReduceOp.Max):
        return jnp.asarray(-0.0 if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.asarray(jnp.inf if op is ReduceOp.Min else -jnp.inf, dtype)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.max if op is ReduceOp.Min else limits.min, dtype)


def _adasum_rows(rows: jax.Array, lengths: Sequence[int]) -> jax.Array:
    """Adasum of the ranks' rows, array by array, as a binary tree of neighbours (see :func:`_adasum`)."""
    edges = [0, *_running(lengths)]
    parts = [rows[:, begin:end] for begin, end in itertools.pairwise(edges)]
    return jnp.concatenate([_adasum_tree(part) for part in parts])


def _adasum_tree(rows: jax.Array) -> jax.Array:
    level = list(rows)
    while len(level) > 1:
        level = [_adasum(one, other) for one, other in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _adasum(a: jax.Array, b: jax.Array) -> jax.Array:
    """``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``; a vector of zeros counts for nothing.

    (Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924, equation 2.)
    """
    dot, norm_a, norm_b = (jnp.sum(x * y) for x, y in ((a, b), (a, a), (b, b)))
    one = jnp.ones((), a.dtype)
    factor_a = jnp.where(norm_a > 0, 1 - dot / (2 * jnp.where(norm_a > 0, norm_a, one)), one)
    factor_b = jnp.where(norm_b > 0, 1 - dot / (2 * jnp.where(norm_b > 0, norm_b, one)), one)
    return a * factor_a + b * factor_b


def _running(lengths: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for length in lengths:
        total += length
        sums.append(total)
    return sums


def _scaled(array: jax.Array, reduction: Reduction, size: int) -> jax.Array:
    """What the reduction of one rank alone makes."""
    if reduction.prescale == 1 and reduction.postscale == 1:
        return array
    scaled = _factor(array.astype(wide(array.dtype, reduction)), reduction.prescale)
    return _factor(scaled, reduction.postscale).astype(array.dtype)


def _factor(array: jax.Array, factor: float) -> jax.Array:
    return array if factor == 1.0 else array * jnp.asarray(factor, array.dtype)


def _join(arrays: Sequence[jax.Array]) -> jax.Array:
    flat = [array.reshape(math.prod(array.shape)) for array in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


_FOLD: dict[ReduceOp, Callable[[jax.Array], jax.Array]] = {
    ReduceOp.Average: lambda rows: jnp.sum(rows, axis=0, dtype=rows.dtype),
    ReduceOp.Sum: lambda rows: jnp.sum(rows, axis=0, dtype=rows.dtype),
    ReduceOp.Min: lambda rows: jnp.min(rows, axis=0),
    ReduceOp.Max: lambda rows: jnp.max(rows, axis=0),
    ReduceOp.Product: lambda rows: jnp.prod(rows, axis=0, dtype=rows.dtype),
}
