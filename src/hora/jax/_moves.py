"""Collectives that move arrays without combining them: allgather, broadcast, alltoall; and the barrier.

The same call on every rank, in the same order: outside of ``jit``, or inside :func:`hora.spmd` or
``shard_map``. They take every dtype, and what arrives is what was sent, bit by bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hora.adapter.agreement import rows as rows_of
from hora.adapter.ops import Kind
from hora.core.errors import CollectiveError
from hora.jax import _host, _traced
from hora.jax._context import required
from hora.jax._leaves import Tree, as_bytes, from_bytes
from hora.jax._process_sets import ProcessSet, check_root, global_process_set, member_set

__all__ = ["allgather", "alltoall", "barrier", "broadcast", "broadcast_tree", "grouped_allgather"]


def allgather(value: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the arrays of all ranks along the first dimension, in the order of ranks.

    Args:
        value: a pytree. Outside of ``jit`` the first dimensions may differ between ranks (0 too). An array
            without dimensions counts as one of shape ``(1,)``.
        name: appears in the timeline and in messages.
        process_set: the ranks that take part; inside ``jit`` all call, and get the rows of its members.

    Raises:
        CollectiveError: on every rank, when dtypes or other dimensions differ.
    """
    context = required("allgather")
    members = member_set(process_set, function="allgather", inside=_traced.is_inside())
    tree = Tree(value, function="allgather")
    if _traced.is_inside():
        return tree.made_of(_traced.allgather(tree.arrays, _traced.mask(members, context)))
    _traced.require_host(tree.arrays, "allgather")
    arrays = [np.atleast_1d(np.asarray(array)) for array in tree.arrays]
    if len(members.members) == 1:
        return tree.made_of([jnp.atleast_1d(array) for array in tree.arrays])
    with context.collective(Kind.ALLGATHER, arrays, members, name=name):
        told = rows_of(context, [array.shape[0] for array in arrays], members)
        rows = list(zip(*told, strict=True))  # rows[array][member]
        lengths = [
            sum(count[member] * _row_bytes(array) for count, array in zip(rows, arrays, strict=True))
            for member in range(len(members.members))
        ]
        parts = _host.gather_bytes(_joined(arrays), lengths, context.places(members))
    results = []
    offsets = [0] * len(parts)
    for count, array in zip(rows, arrays, strict=True):
        pieces = []
        for member, part in enumerate(parts):
            length = count[member] * _row_bytes(array)
            piece = part[offsets[member] : offsets[member] + length]
            offsets[member] += length
            pieces.append(from_bytes(piece, (count[member], *array.shape[1:]), array.dtype))
        results.append(jax.device_put(np.concatenate(pieces)))
    return tree.made_of(results)


def grouped_allgather(values: Sequence[Any], **options: Any) -> list[Any]:
    """:func:`allgather` of a list in one message, under Horovod's name; arguments as there."""
    results: list[Any] = list(allgather(list(values), **options))
    return results


def broadcast(
    value: Any,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The arrays of ``root_rank``, on every rank, bit by bit.

    Args:
        value: a pytree; the same structure, shapes and dtypes on every rank. Keys of ``jax.random.key`` are
            taken, too. A global array that is the same on all ranks becomes one again.
        root_rank: whose values all ranks get; counted in the whole job, with a process set too.
        name: appears in the timeline and in messages.
        process_set: the ranks that take part; inside ``jit`` all call, and the others get their own arrays
            back.

    Raises:
        CollectiveError: ``root_rank`` is not a rank of this job, or a call that is traced by plain ``jit``.
    """
    return broadcast_tree(value, root_rank, function="broadcast", name=name, process_set=process_set)


def alltoall(
    value: Any,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows of the array to each rank, and join the rows that come from each.

    Args:
        value: an array; all dimensions but the first are the same on every rank.
        splits: how many rows each rank gets, in the order of ranks; None to share the rows evenly. Inside
            ``jit`` rows are shared evenly.
        name: appears in the timeline and in messages.
        process_set: the ranks that take part; only they call.

    Returns:
        The received rows in the order of ranks. With ``splits`` a pair: those, and how many rows came from
        each rank.

    Raises:
        CollectiveError: splits that are no whole numbers, or do not sum to the rows of the array.
    """
    context = required("alltoall")
    inside = _traced.is_inside()
    members = member_set(process_set, function="alltoall", inside=inside)
    tree = Tree(value, function="alltoall")
    if len(tree.arrays) != 1:
        raise CollectiveError(
            f"alltoall takes one array, not a tree of {len(tree.arrays)}.", fix="Call it for each of them."
        )
    [array] = tree.arrays
    if inside:
        if splits is not None or _traced.mask(members, context) is not None:
            raise CollectiveError(
                "alltoall inside jit shares rows evenly among all ranks of the mesh: shapes are the same "
                "on all.",
                fix="Leave splits= and process_set= out, or call hora.alltoall() outside of jit.",
            )
        return tree.made_of([_traced.alltoall(array)])
    _traced.require_host(tree.arrays, "alltoall")
    size = len(members.members)
    chosen = _splits(array, splits, size)
    data = np.asarray(array)
    if size == 1:
        result = tree.made_of([array])
        return result if splits is None else (result, np.array(chosen, np.int32))
    with context.collective(Kind.ALLTOALL, [data], members, name=name):
        table = rows_of(context, chosen, members, what="splits")
        index = members.members.index(context.world.rank)
        unit = _row_bytes(data)
        edges = np.cumsum([0, *chosen])
        blocks = [as_bytes(data[begin:end]) for begin, end in itertools.pairwise(edges)]
        counts = [row[index] for row in table]
        longest = max(max(row) for row in table) * unit
        lengths = [count * unit for count in counts]
        received = _host.alltoall(blocks, lengths, longest, context.places(members))
    joined = from_bytes(np.concatenate(received), (sum(counts), *data.shape[1:]), data.dtype)
    result = tree.made_of([jax.device_put(joined)])
    return result if splits is None else (result, np.array(counts, np.int32))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has come here. Inside ``jit`` there is nothing to wait for."""
    context = required("barrier")
    if _traced.is_inside():
        return
    members = member_set(process_set, function="barrier")
    if len(members.members) > 1:
        with context.collective(Kind.BARRIER, [], members):
            _host.barrier(context.places(members))


def broadcast_tree(
    value: Any,
    root_rank: int,
    *,
    function: str,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    **details: Any,
) -> Any:
    """:func:`broadcast`, on behalf of ``function``."""
    context = required(function)
    inside = _traced.is_inside()
    members = member_set(process_set, function=function, inside=inside)
    check_root(root_rank, members, function=function)
    tree = Tree(value, function=function, keys=True)
    if inside:
        place = (
            root_rank
            if _traced.mask(members, context) is not None or members is global_process_set
            else members.members.index(root_rank)
        )
        return tree.made_of(
            _traced.broadcast(
                [jnp.asarray(each) for each in tree.arrays], place, _traced.mask(members, context)
            )
        )
    _traced.require_host(tree.arrays, function)
    if len(members.members) == 1:
        return tree.made_of(tree.arrays)
    arrays = [np.asarray(array) for array in tree.arrays]
    if details:
        details = {"items": tuple(tree.names)}
    with context.collective(function, arrays, members, name=name, root=root_rank, **details):
        mine = _joined(arrays) if context.world.rank == root_rank else None
        data = _host.broadcast_bytes(mine, sum(array.nbytes for array in arrays), context.places(members))
    results, start = [], 0
    for array in arrays:
        results.append(
            jax.device_put(from_bytes(data[start : start + array.nbytes], array.shape, array.dtype))
        )
        start += array.nbytes
    return tree.made_of(results)


def _splits(array: Any, splits: Sequence[int] | None, size: int) -> list[int]:
    if array.ndim == 0:
        raise CollectiveError(
            "alltoall splits along the first dimension, but the array has none.",
            fix="Write array.reshape(1), or use hora.allgather.",
        )
    rows = array.shape[0]
    if splits is None:
        if rows % size:
            raise CollectiveError(
                f"alltoall: {rows} rows do not divide among {size} ranks.",
                fix=f"Give splits=[...], {size} numbers of rows that sum to {rows}.",
            )
        return [rows // size] * size
    given = np.asarray(splits)
    if given.dtype.kind not in "iu" or given.shape != (size,):
        raise CollectiveError(
            f"alltoall: splits={splits!r} are not {size} whole numbers.",
            fix="Give one number of rows for each rank of the process set.",
        )
    if (given < 0).any() or given.sum() != rows:
        raise CollectiveError(
            f"alltoall: splits={given.tolist()} do not sum to the {rows} rows of the array.",
            fix="Let the numbers be 0 or more and sum to array.shape[0].",
        )
    chosen: list[int] = given.tolist()
    return chosen


def _joined(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.concatenate([as_bytes(array) for array in arrays]) if arrays else np.zeros(0, np.uint8)


def _row_bytes(array: np.ndarray[Any, Any]) -> int:
    return int(array.dtype.itemsize * np.prod(array.shape[1:], dtype=np.int64))
