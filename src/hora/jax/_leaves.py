"""The leaves of a pytree as arrays that can travel, and the tree made of the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hora.adapter.ops import ReduceOp
from hora.core.errors import CollectiveError

__all__ = ["Tree", "as_bytes", "check_reduction", "from_bytes"]


class Tree:
    """A pytree taken apart.

    Attributes:
        arrays: its leaves, as arrays of this rank or traced ones; keys of ``jax.random.key`` as their
            numbers.
        names: the way to each leaf, such as ``['w1']``.

    Args:
        value: a pytree of arrays and numbers. A global array must be the same on every rank.
        function: who asks, for messages.
        keys: whether keys of ``jax.random.key`` can be taken.

    Raises:
        CollectiveError: a leaf that is no array or number, or a global array of which each rank has a part.
    """

    def __init__(self, value: Any, *, function: str, keys: bool = False) -> None:
        pairs, self._structure = jax.tree_util.tree_flatten_with_path(value)
        self.names = [jax.tree_util.keystr(path) for path, _ in pairs]
        self._global: list[Any] = []
        self._keys: list[Any] = []
        self.arrays = [
            self._take(leaf, name, function, keys) for (_, leaf), name in zip(pairs, self.names, strict=True)
        ]

    def made_of(self, arrays: Sequence[Any]) -> Any:
        """The same tree of other arrays: global where they were, and keys again."""
        leaves = []
        for array, sharding, implementation in zip(arrays, self._global, self._keys, strict=True):
            leaf = array
            if sharding is not None:
                devices = list(sharding.addressable_devices)
                copies = [jax.device_put(array, device) for device in devices]
                leaf = jax.make_array_from_single_device_arrays(array.shape, sharding, copies)
            leaves.append(
                leaf if implementation is None else jax.random.wrap_key_data(leaf, impl=implementation)
            )
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def _take(self, leaf: Any, name: str, function: str, keys: bool) -> Any:
        implementation = None
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            if not keys:
                raise CollectiveError(
                    f"{function} cannot combine the random keys{_at(name)}.",
                    fix="Broadcast them: key = hora.broadcast(key), and fold the rank in where ranks "
                    "shall differ.",
                )
            implementation = jax.random.key_impl(leaf)
            leaf = jax.random.key_data(leaf)
        self._keys.append(implementation)
        sharding = None
        if isinstance(leaf, jax.core.Tracer):
            array: Any = leaf
        elif isinstance(leaf, jax.Array):
            array = leaf
            if not leaf.is_fully_addressable:
                if not leaf.is_fully_replicated:
                    raise CollectiveError(
                        f"{function} got a global array{_at(name)}, shape {leaf.shape}, of which each rank "
                        "has a part: it is one value already.",
                        fix="Compute with it inside jit, or take this rank's part: hora.local(array).",
                    )
                sharding, array = leaf.sharding, leaf.addressable_data(0)
        else:
            array = _array(leaf, name, function)
        self._global.append(sharding)
        return array


def check_reduction(arrays: Sequence[Any], op: ReduceOp, size: int, *, function: str) -> None:
    """Raise CollectiveError for a dtype that ``op`` has no meaning for."""
    if not isinstance(op, ReduceOp):
        raise CollectiveError(f"{op!r} is not a reduce operation.", fix="Write op=hora.Sum, for example.")
    for dtype in {np.dtype(array.dtype) for array in arrays}:
        exact = not jnp.issubdtype(dtype, jnp.inexact)
        if dtype.name.startswith(("int2", "int4", "uint2", "uint4", "float4")):
            raise CollectiveError(
                f"{function} does not combine {dtype} arrays.", fix="Convert first: array.astype(jnp.int8)."
            )
        if dtype == np.bool_ and op not in (ReduceOp.Min, ReduceOp.Max):
            raise CollectiveError(
                f"{function} has no {op.name} of bool arrays.",
                fix="Write op=hora.Max for any, op=hora.Min for all, or array.astype(int) to count.",
            )
        if op is ReduceOp.Average and exact:
            raise CollectiveError(
                f"{function} has no Average of {dtype} arrays: the result would be truncated.",
                fix="Write op=hora.Sum, or array.astype(float) for a fractional average.",
            )
        if jnp.issubdtype(dtype, jnp.complexfloating) and op in (ReduceOp.Min, ReduceOp.Max, ReduceOp.Adasum):
            raise CollectiveError(
                f"{function} has no {op.name} of complex numbers.", fix="Reduce abs(array), or its parts."
            )
        if op is ReduceOp.Adasum and (exact or size & (size - 1)):
            raise CollectiveError(
                f"{function} has no Adasum of {dtype} arrays."
                if exact
                else f"{function}: Adasum combines ranks in pairs, which {size} ranks do not allow.",
                fix="Write op=hora.Average." if not exact else "Write op=hora.Sum, or array.astype(float).",
            )


def as_bytes(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array's memory as bytes."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def from_bytes(data: np.ndarray[Any, Any], shape: Sequence[int], dtype: Any) -> np.ndarray[Any, Any]:
    """The array that has this memory."""
    array: np.ndarray[Any, Any] = np.ascontiguousarray(data).view(np.dtype(dtype)).reshape(shape)
    return array


def _array(leaf: Any, name: str, function: str) -> jax.Array:
    try:
        return jax.device_put(np.asarray(leaf))  # jnp.asarray would compile a program for each shape
    except (TypeError, ValueError) as error:
        raise CollectiveError(
            f"{function} takes arrays and numbers, not {type(leaf).__name__}{_at(name)}.",
            fix="Take it out of the tree, or use hora.broadcast_object(value) for other objects.",
        ) from error


def _at(name: str) -> str:
    return f" at {name}" if name else ""
