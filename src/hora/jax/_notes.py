"""What a compiled step tells of this rank's own gradients: one output more, with a number for each of them.

A call back to Python from inside a program would cost a millisecond on the CPU, where this costs the time to
read the gradients once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

__all__ = ["Notes", "collecting", "note"]

_local = threading.local()


class Notes:
    """What is noted while a step is traced.

    Attributes:
        names: of the gradients.
        scaled: whether losses are scaled so that gradients may overflow.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.scaled = False
        self._sums: list[jax.Array] = []
        self._place: Any = None

    def begin(self) -> None:
        """The step is traced, perhaps again."""
        self.names, self._sums = [], []
        self._place = core.get_opaque_trace_state()

    def add(self, gradients: Any, names: list[str] | None, *, scaled: bool) -> None:
        """Note gradients, unless they are traced further inside, as in a loop or a condition."""
        if core.get_opaque_trace_state() != self._place:
            return
        pairs = jax.tree_util.tree_flatten_with_path(gradients)[0]
        found = [named(path) for path, _ in pairs] if names is None else names
        for name, (_, leaf) in zip(found, pairs, strict=True):
            if jnp.issubdtype(leaf.dtype, jnp.inexact):
                self.names.append(name)
                self._sums.append(_sum(leaf))
        self.scaled |= scaled

    def take(self) -> jax.Array:
        """The sum of each gradient, of shape (1, number): not finite if an element is not."""
        sums, self._sums, self._place = self._sums, [], None
        return jnp.stack(sums)[None] if sums else jnp.zeros((1, 0), jnp.float32)


@contextlib.contextmanager
def collecting(notes: Notes) -> Iterator[None]:
    """Gradients that are averaged while the block is traced are noted there."""
    outer = getattr(_local, "notes", None)
    _local.notes = notes
    notes.begin()
    try:
        yield
    finally:
        _local.notes = outer


def note(gradients: Any, *, names: list[str] | None = None, scaled: bool = False) -> None:
    """These gradients of this rank are about to be averaged.

    Args:
        gradients: a pytree.
        names: of its leaves; None: as they stand in the tree.
        scaled: whether losses are scaled so that they may overflow.
    """
    notes = getattr(_local, "notes", None)
    if notes is not None:
        notes.add(gradients, names, scaled=scaled)


def named(path: Any) -> str:
    """A leaf's name: ``dense.kernel``; without the places in tuples around it, such as of arguments."""
    words = [jax.tree_util.keystr((key,), simple=True) for key in path]
    while len(words) > 1 and isinstance(path[-len(words)], jax.tree_util.SequenceKey):
        words.pop(0)
    return ".".join(words)


def _sum(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return (jnp.sum(leaf.real) + jnp.sum(leaf.imag)).astype(jnp.float32)
    return jnp.sum(leaf, dtype=jnp.float32 if leaf.dtype.itemsize < 4 else None).astype(jnp.float32)
