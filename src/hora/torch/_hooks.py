"""What autograd calls on behalf of a reducer: for each gradient, and at the end of each backward.

Parameters outlive optimizers, and what they hold must not keep the latter alive: so all references here
are weak.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["End", "Place", "gradient_hook"]


class _Reducer(Protocol):
    task: int

    def enter(self, task: int) -> None: ...

    def advance(self) -> None: ...

    def end(self, cycle: int) -> None: ...


class End:
    """The callback at the end of one backward. Its life tells whether that backward is still going on:
    autograd drops it, uncalled, when backward raises.
    """

    def __init__(self, reducer: _Reducer, cycle: int) -> None:
        self._reducer = weakref.ref(reducer)
        self._cycle = cycle

    def __call__(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.end(self._cycle)


class Place:
    """Where a parameter's gradient goes: its number in a bucket's set of those that are waited for."""

    __slots__ = ("index", "waiting")
    waiting: set[int]
    index: int


def gradient_hook(reducer: _Reducer, place: Place) -> Callable[[torch.Tensor], None]:
    """The function that autograd calls for each gradient; kept short, for models of many small tensors."""
    reference = weakref.ref(reducer)
    current_task = torch._C._current_graph_task_id

    def hook(parameter: torch.Tensor) -> None:
        reducer = reference()
        if reducer is None:
            return
        task = current_task()
        if task != reducer.task:
            reducer.enter(task)
        waiting = place.waiting
        waiting.discard(place.index)
        if not waiting:
            reducer.advance()

    return hook
