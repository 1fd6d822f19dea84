"""When an elastic job is given up: what failed again and again, and made no progress in between."""

from __future__ import annotations

from hora.core.plural import plural
from hora.launch.failure import Outcome

__all__ = ["Limits"]

FRUITLESS = 3
"""Failures by an exception of the script's own, without a commit in between, until the job is given up."""

UNLUCKY = 10
"""The same of failures otherwise: a signal, a lost connection."""


class Limits:
    """Counts failures.

    Args:
        resets: how often a world may be lost; None: as often as it makes progress.
    """

    def __init__(self, resets: int | None) -> None:
        self._most = resets
        self._resets = 0
        self._fruitless = 0
        self._unlucky = 0

    def progress(self) -> None:
        """A commit: what has failed before does not count any more."""
        self._fruitless = self._unlucky = 0

    def failed(self, outcome: Outcome | None) -> str | None:
        """A worker has failed, or (None) lost its connections: why the job is given up; None if it is not."""
        if outcome is not None and outcome.record is not None and not outcome.echo:
            self._fruitless += 1
        else:
            self._unlucky += 1
        if self._fruitless < FRUITLESS and self._unlucky < UNLUCKY:
            return None
        count = self._fruitless if self._fruitless >= FRUITLESS else self._unlucky
        return f"given up: {count} failures without a commit in between"

    def reset(self, reason: str) -> str | None:
        """A world is lost: why the job is given up; None if it is not."""
        self._resets += 1
        if self._most is None or self._resets <= self._most:
            return None
        return f"given up after {self._most} {plural(self._most, 'reset')}: {reason}"
