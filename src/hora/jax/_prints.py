"""Do the ranks still have the same? Fingerprints of what a step takes and gives that all ranks should share.

``hora.spmd`` takes its word for it that parameters are the same on all ranks, and so does JAX: arrays that
a program calls replicated are never compared. So the guard gets fingerprints of them, before the first step
and after some.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from hora.adapter.frames import at
from hora.guard.reporter import Reporter
from hora.jax._own import Accumulated, Own

__all__ = ["Prints"]

EVERY = 50
"""After steps 1, 2, 4, 8, 16 and 32 there is a fingerprint every so many steps."""

MOST = 1000
"""Arrays that are looked at."""

BLOCKS = 64
"""Blocks of a large array, each folded to the sum of its 64-bit words, which runs at the speed of memory."""


class Prints:
    """Those of one step.

    Args:
        reporter: the link to the supervisor.
        name: of the step.
        size: number of ranks.
    """

    def __init__(self, reporter: Reporter, name: str, size: int) -> None:
        self._reporter = reporter
        self._name = name
        self._key = f"step {name}"
        self._size = size
        self._steps = 0

    def before(self, arguments: Any) -> None:
        """A step is about to begin with these arguments."""
        if self._steps:
            return
        pairs = list(_shared(arguments))
        record = {
            "kind": "replica",
            "key": self._key,
            "members": list(range(self._size)),
            "distributed": True,
            "broadcast": False,
            "changed": [],
            "seed": None,
            "restored": [],
            "names": [name for name, _ in pairs],
            "optimizer": self._name,
            "where": at()[0],
            "together": None,
            "stateful": False,
            "parameters": [digest(array) for _, array in pairs],
            "state": [],
            "rates": [],
        }
        self._reporter.send(record)

    def after(self, results: Any) -> None:
        """A step has been started, and will give these results; now and then it is waited for."""
        self._steps += 1
        steps = self._steps
        if steps % EVERY and not (steps < EVERY and steps & (steps - 1) == 0):
            return
        record = {
            "kind": "print",
            "key": self._key,
            "step": steps,
            "parameters": [digest(array) for _, array in _shared(results)],
            "gradients": [],
            "state": [],
            "rates": [],
            "written": [],
            "restored": [],
            "steered": [],
            "buffers": None,
        }
        self._reporter.send(record)


def digest(array: jax.Array) -> int:
    """A number: different for different bits, but for chance."""
    data = np.ascontiguousarray(np.asarray(array.addressable_data(0))).reshape(-1).view(np.uint8)
    whole = len(data) - len(data) % (8 * BLOCKS)
    words = data[:whole].view(np.uint64).reshape(BLOCKS, -1).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(data[whole:].tobytes(), zlib.crc32(words.tobytes()))


def _shared(tree: Any) -> Iterator[tuple[str, jax.Array]]:
    """The arrays that all ranks should have alike, with their names, up to :data:`MOST`."""
    pairs = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda each: isinstance(each, Accumulated | Own)
    )[0]
    count = 0
    for path, leaf in pairs:
        if isinstance(leaf, Accumulated):
            for name, array in _shared(leaf.inner):
                yield jax.tree_util.keystr(path) + name, array
        elif isinstance(leaf, jax.Array) and _is_shared(leaf):
            count += 1
            if count > MOST:
                return
            yield jax.tree_util.keystr(path), leaf


def _is_shared(array: jax.Array) -> bool:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return not is_key and not array.is_fully_addressable and array.is_fully_replicated
