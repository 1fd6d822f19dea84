"""Presentation may not call a collective.

A display lives on one rank. Were it to reduce a metric, that rank would wait for the others, which are
busy with the training. So whatever shows something runs inside :func:`presenting`, and every collective
asks :func:`is_presenting` first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["is_presenting", "presenting"]

_presenting: ContextVar[bool] = ContextVar("hora_presenting", default=False)


@contextlib.contextmanager
def presenting() -> Iterator[None]:
    """Something is shown while the block runs."""
    token = _presenting.set(True)
    try:
        yield
    finally:
        _presenting.reset(token)


def is_presenting() -> bool:
    """Whether the caller shows something."""
    return _presenting.get()
