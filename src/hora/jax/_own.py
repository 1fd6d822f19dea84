"""Parts of an optimizer's state that are each rank's own, between updates or for good."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

__all__ = ["Accumulated", "Own"]


class Accumulated(NamedTuple):
    """The optimizer's state where gradients add up over several backward passes.

    Attributes:
        inner: the state of the optimizer itself.
        sums: of this rank's gradients since the last update; each rank's own.
        passes: backward passes since then.
    """

    inner: Any
    sums: Any
    passes: jax.Array


class Own(NamedTuple):
    """The optimizer's state with ``op=hora.Adasum``, which is made of this rank's gradients alone.

    Attributes:
        inner: the state of the optimizer itself.
    """

    inner: Any
