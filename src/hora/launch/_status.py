"""Rank 0's status pipe: the progress that it tells, shown on the console."""

from __future__ import annotations

import os
import sys

from hora.core import settings
from hora.launch.job import Job, rank_environment
from hora.launch.output import Console

__all__ = ["Status"]

CHUNK = 1 << 18
"""Bytes read at once, and the longest record."""


class Status:
    """Reads the pipe.

    Args:
        fd: its end here.
        console: shows what comes; nothing is shown of a quiet job.
    """

    def __init__(self, fd: int, console: Console, job: Job) -> None:
        self._fd = fd
        self._console = console
        self._job = job
        self._rest = b""

    def read(self) -> bool:
        """Take in what is there; False when nothing will come any more."""
        data = os.read(self._fd, CHUNK)
        self.feed(data)
        return bool(data)

    def feed(self, data: bytes) -> None:
        """Take in what a rank has told."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-CHUNK:]
        if lines and not self._job.quiet:
            self._show([line.decode("utf-8", "replace") for line in lines])

    def _show(self, lines: list[str]) -> None:
        from hora.core import progress  # only a job that shows any needs it

        console = self._console
        if console.display is None:
            console.display = progress.display(settings.load(rank_environment(self._job)), stream=sys.stderr)
        for line in lines:
            record = progress.decode(line)
            if isinstance(record, str):
                console.display.note(record)
            elif record is not None:
                console.display.update(record)
