"""Handles of operations under way: what the ``_async`` forms return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hora.core.errors import CollectiveError
from hora.torch._request import Request, Work, dispatcher

__all__ = ["Handle", "poll", "submit", "synchronize"]


class Handle:
    """An operation under way. Give it to ``synchronize`` once; calling it does the same."""

    __slots__ = ("_finish", "_kind", "_works")

    def __init__(self, kind: str, works: list[Work], finish: Callable[[list[Any]], Any]) -> None:
        self._kind = kind
        self._works: list[Work] | None = works
        self._finish = finish

    def __call__(self) -> Any:
        """The result, as ``synchronize`` returns it."""
        return synchronize(self)

    def __repr__(self) -> str:
        if self._works is None:
            return f"Handle({self._kind}, taken)"
        return f"Handle({self._kind}, {'done' if poll(self) else 'under way'})"


def submit(request: Request, finish: Callable[[Any], Any] | None = None) -> Handle:
    """Start the request; ``finish`` changes its result."""
    work = dispatcher().submit(request)
    return Handle(request.kind.value, [work], lambda results: finish(results[0]) if finish else results[0])


def poll(handle: Handle) -> bool:
    """Whether ``synchronize`` would return at once."""
    return all(work.done() for work in _works(handle, "poll"))


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result: what the form without ``_async`` returns.

    Raises:
        CollectiveError: it was synchronized before, or is no handle; or what the operation itself raises.
    """
    works = _works(handle, "synchronize")
    handle._works = None
    return handle._finish([work.wait() for work in works])


def _works(handle: Handle, function: str) -> list[Work]:
    if not isinstance(handle, Handle):
        raise CollectiveError(
            f"{function} takes a handle, not {type(handle).__name__}.",
            fix="Give it what a function such as hora.allreduce_async returned.",
        )
    if handle._works is None:
        raise CollectiveError(
            f"{function}: the result of this {handle._kind} was taken before.",
            fix="Keep what the first hora.synchronize(handle) returned.",
        )
    return handle._works
