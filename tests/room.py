"""Tests that measure seconds run alone: nothing of another test process takes their time meanwhile.

Two locked files that all test processes of a session share. A test process goes through the turnstile, one
at a time, and into the room: with others, or alone for a test that is marked ``alone``. Who waits to be
alone stays in the turnstile, so that nobody else comes in and the room empties.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Room"]


class Room:
    """Where one test process runs its tests; ``close()`` closes its files.

    Args:
        folder: of the two files; the same for all processes of a session.
    """

    def __init__(self, folder: Path) -> None:
        self._turnstile = (folder / "turnstile").open("w")
        self._room = (folder / "room").open("w")
        self._blocks = 0

    @contextlib.contextmanager
    def entered(self, *, alone: bool = False) -> Iterator[None]:
        """Be inside while the block runs.

        A block may begin inside of another and end after it, as for jobs that run on between the tests that
        look at them: this process stays until the last one has ended, as the first one came.

        Args:
            alone: without any other process.
        """
        if not self._blocks:
            fcntl.flock(self._turnstile, fcntl.LOCK_EX)
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self._turnstile, fcntl.LOCK_UN)
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:  # by name, as ranks that were forked inside may have the file open, too
                fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        self._turnstile.close()
        self._room.close()
