"""Starting all ranks from the same parameters and optimizer state."""

from __future__ import annotations

from typing import Any

from hora.jax._moves import broadcast_tree

__all__ = ["broadcast_parameters"]


def broadcast_parameters(params: Any, root_rank: int = 0) -> Any:
    """The parameters of ``root_rank``, on every rank; the state of an optimizer, too.

    JAX's arrays do not change, so it returns them: ``params = hora.broadcast_parameters(params)``.

    Args:
        params: a pytree of arrays, numbers and random keys: parameters, an Optax state, or a tuple of them.
            Global arrays that are the same on all ranks become such again.
        root_rank: whose values all ranks get.

    Returns:
        The tree of ``root_rank``'s values, bit by bit, as JAX arrays.

    Raises:
        VerdictError, CollectiveError: on every rank, naming the first difference, when names, shapes or
            dtypes differ.
    """
    return broadcast_tree(params, root_rank, function="broadcast_parameters", items=True)
