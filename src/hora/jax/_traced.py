"""Collectives inside ``shard_map``: JAX's own, with the semantics of Hora's.

All ranks of the mesh run one program, so every shape is the same on all of them and nothing is left to agree
on. A process set takes part by a mask: its members get the result, the others their own arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hora.adapter.guard import Members
from hora.core.errors import CollectiveError
from hora.jax._context import Context
from hora.jax._mesh import AXIS
from hora.jax._reduce import Reduction, members_only, reduce_arrays, scatter_rows, together, vary

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "is_inside",
    "mask",
    "reducescatter",
    "require_host",
]


def is_inside() -> bool:
    """Whether this is traced inside ``shard_map`` over the mesh of the ranks."""
    try:
        lax.axis_size(AXIS)
    except NameError:
        return False
    return True


def mask(process_set: Members, context: Context) -> list[int] | None:
    """Places on the mesh that take part; None: all of them, as in a mesh of the process set's own ranks.

    Raises:
        CollectiveError: the mesh is neither of all ranks nor of those of the process set.
    """
    size = lax.axis_size(AXIS)
    members = process_set.members
    if size == len(members):
        return None
    if size == context.world.size:
        return members
    raise CollectiveError(
        f"This is traced for a mesh of {size} ranks, but {process_set} has {len(members)}.",
        fix="Use hora.mesh(), of all ranks, or hora.mesh(process_set).",
    )


def allreduce(arrays: Sequence[jax.Array], reduction: Reduction, members: Sequence[int] | None) -> list[Any]:
    return reduce_arrays(arrays, reduction, axis=AXIS, members=members)


def allgather(arrays: Sequence[jax.Array], members: Sequence[int] | None) -> list[Any]:
    """The rows of all ranks, in the order of ranks; of a set's members on every rank of the mesh."""
    results = []
    for array in arrays:
        rows = lax.all_gather(vary(jnp.atleast_1d(array), AXIS), AXIS)
        chosen = rows if members is None else rows[jnp.asarray(list(members))]
        results.append(chosen.reshape(-1, *chosen.shape[2:]))
    return results


def broadcast(arrays: Sequence[jax.Array], root: int, members: Sequence[int] | None) -> list[Any]:
    """The arrays of the place ``root`` of the mesh: a sum in which the others give what changes nothing."""
    mine = lax.axis_index(AXIS) == root
    results = []
    for array in arrays:
        is_bool = array.dtype == jnp.bool_
        sent = vary(array.astype(jnp.uint8) if is_bool else array, AXIS)
        neutral = (
            jnp.full_like(sent, -0.0) if jnp.issubdtype(sent.dtype, jnp.inexact) else jnp.zeros_like(sent)
        )
        result = lax.psum(jnp.where(mine, sent, neutral), AXIS).astype(array.dtype)
        if members is not None:
            result = jnp.where(members_only(members, AXIS), result, array)
        results.append(result)
    return results


def alltoall(array: jax.Array) -> jax.Array:
    size = lax.axis_size(AXIS)
    check_even(array, size, "alltoall")
    return together(lax.all_to_all, vary(array, AXIS), AXIS, split_axis=0, concat_axis=0, tiled=True)


def reducescatter(array: jax.Array, reduction: Reduction) -> jax.Array:
    check_even(array, lax.axis_size(AXIS), "reducescatter")
    return scatter_rows(vary(array, AXIS), reduction, axis=AXIS)


def check_even(array: jax.Array, size: int, function: str) -> None:
    """Raise CollectiveError unless the rows divide among the ranks: shapes are the same on all inside jit."""
    if array.ndim == 0 or array.shape[0] % size:
        rows = "no first dimension" if array.ndim == 0 else f"{array.shape[0]} rows"
        raise CollectiveError(
            f"{function} inside jit: {rows} cannot be shared evenly among {size} ranks, and inside one "
            "program every rank's arrays have the same shape.",
            fix=f"Pad the array to a multiple of {size} rows, or call hora.{function}() outside of jit.",
        )


def require_host(arrays: Sequence[Any], function: str) -> None:
    """Raise CollectiveError for a call that is traced, but not inside ``shard_map`` over the mesh of the
    ranks.
    """
    if not any(isinstance(array, jax.core.Tracer) for array in arrays):
        return
    raise CollectiveError(
        f"hora.{function}() was called on traced arrays outside of the ranks' mesh: plain jit, grad or "
        "vmap. There an array is either this rank's alone or already global, and nothing can be exchanged.",
        fix=f"Write step = hora.spmd(step, split=...) instead of jax.jit(step), or call hora.{function}() "
        "on the results outside of jit.",
    )
