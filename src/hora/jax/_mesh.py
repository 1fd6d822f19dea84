"""The mesh of the ranks, and arrays on it: global ones from what each rank has, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["AXIS", "Places", "is_global", "on_host"]

AXIS = "hora"
"""Name of the mesh axis along which the ranks lie."""


class Places:
    """The ranks of one process set as a mesh of one device each.

    Attributes:
        mesh: of one axis, :data:`AXIS`.
        device: this rank's.
        size: number of ranks.
        rows: the sharding of arrays of which each rank has some rows.
        same: the sharding of arrays that all ranks have whole.
        programs: compiled collectives, by what they do.
    """

    def __init__(self, ranks: Sequence[int], device: jax.Device) -> None:
        first: dict[int, jax.Device] = {}
        for each in jax.devices(device.platform):
            first.setdefault(each.process_index, each)
        first[device.process_index] = device
        processes = sorted(first) if len(ranks) == 1 and jax.process_count() == 1 else list(ranks)
        self.device = device
        self.mesh = Mesh(np.array([first[process] for process in processes]), (AXIS,))
        self.size = len(processes)
        self.rows = NamedSharding(self.mesh, PartitionSpec(AXIS))
        self.same = NamedSharding(self.mesh, PartitionSpec())
        self.programs: dict[Any, Any] = {}

    def stacked(self, array: Any) -> jax.Array:
        """The global array whose row of this rank is ``array``, of shape ``(1, ...)``."""
        local = self.here(array)
        shape = (self.size * local.shape[0], *local.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.rows, [local])

    def replicated(self, array: Any) -> jax.Array:
        """The global array that is ``array`` on every rank."""
        local = self.here(array)
        return jax.make_array_from_single_device_arrays(local.shape, self.same, [local])

    def share(self, leaf: Any) -> jax.Array:
        """The global array of which each rank has as many rows as ``leaf``; a global array as it is."""
        if is_global(leaf) or (isinstance(leaf, jax.Array) and leaf.sharding == self.rows):
            array: jax.Array = leaf
            return array
        return self.stacked(leaf)

    def whole(self, leaf: Any) -> jax.Array:
        """The global array that is ``leaf`` on every rank; a global array as it is."""
        if isinstance(leaf, jax.Array) and leaf.sharding == self.same:
            array: jax.Array = leaf
            return array
        return leaf if is_global(leaf) else self.replicated(leaf)

    def here(self, array: Any) -> jax.Array:
        """The array on this rank's device alone."""
        return jax.device_put(array, self.device)

    def run(self, key: Any, body: Any, arrays: Sequence[Any], *, split: bool = False) -> list[jax.Array]:
        """Run ``body(*arrays)`` inside ``shard_map`` on each rank's rows; this rank's results, on its device.

        Args:
            key: what the body does; the program is kept by it.
            body: gets one array for each of ``arrays``, with a first dimension of 1, and returns a list.
            arrays: of shape ``(1, ...)``.
            split: whether results are rows of each rank, rather than the same on all.
        """
        program = self.programs.get(key)
        if program is None:
            out = PartitionSpec(AXIS) if split else PartitionSpec()
            mapped = jax.shard_map(
                body, mesh=self.mesh, in_specs=PartitionSpec(AXIS), out_specs=out, check_vma=False
            )
            program = self.programs[key] = jax.jit(mapped)
        results = program(*[self.stacked(array) for array in arrays])
        mine = [result.addressable_data(0) for result in results]
        jax.block_until_ready(mine)
        return mine


def is_global(leaf: Any) -> bool:
    """Whether an array lies on several ranks."""
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)
        and not leaf.is_fully_addressable
    )


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """The array in host memory, without a copy where it lies there."""
    return np.asarray(array)
