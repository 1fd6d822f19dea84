"""Counts in sentences: 1 worker, 2 workers."""

from __future__ import annotations

__all__ = ["plural"]


def plural(count: float, noun: str, *, many: str | None = None) -> str:
    """The noun as it stands behind ``count``: ``noun`` for exactly 1, else ``many`` (default: with an s)."""
    if count == 1:
        return noun
    return many if many is not None else noun + "s"
