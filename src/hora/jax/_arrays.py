"""Global arrays: of the rows that the ranks have, or of what all have; and back."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from hora.adapter.agreement import agree
from hora.adapter.guard import Spec
from hora.jax._context import required
from hora.jax._process_sets import ProcessSet, global_process_set

__all__ = ["global_array", "local", "mesh", "replicate"]


def mesh(process_set: ProcessSet = global_process_set) -> Mesh:
    """The mesh of the ranks: one axis, ``hora.AXIS``, along which each rank lies with the device it
    computes on.

    Args:
        process_set: a mesh of its members only, which only they use.
    """
    return required("mesh").places(process_set).mesh


def global_array(value: Any) -> Any:
    """Global arrays of the global batch, of the rows that each rank has.

    Args:
        value: a pytree of this rank's arrays: NumPy's, or JAX's. The first dimensions are equal on all ranks.

    Returns:
        The tree, of arrays with the rows of all ranks in the order of ranks, spread over ``hora.mesh()``.
        Global arrays stay as they are.

    Raises:
        VerdictError, CollectiveError: shapes or dtypes differ between ranks.
    """
    context = required("global_array")
    places = context.everywhere
    leaves, tree = jax.tree.flatten(value)
    arrays = [places.share(leaf) for leaf in leaves]
    key = ("global_array", tuple((array.dtype, array.shape) for array in arrays))
    if key not in context.seen and context.world.size > 1:
        context.seen.add(key)
        agree(context, "global_array", None, [Spec(*each) for each in key[1]], context.everyone)
    return jax.tree.unflatten(tree, arrays)


def replicate(value: Any) -> Any:
    """Global arrays that every rank has whole, of arrays that are the same on all ranks.

    It does not look whether they are: ``hora.replicate(hora.broadcast_parameters(params))`` makes sure.

    Args:
        value: a pytree of this rank's arrays and numbers. Global arrays stay as they are.
    """
    places = required("replicate").everywhere
    return jax.tree.map(places.whole, value)


def local(value: Any) -> Any:
    """This rank's part of global arrays, as arrays of this rank alone: its rows, or the whole of what all
    have.

    Args:
        value: a pytree; arrays that are no global ones stay as they are.
    """
    required("local")
    return jax.tree.map(_part, value)


def _part(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return leaf
    return leaf.addressable_data(0) if len(leaf.addressable_shards) == 1 else leaf
