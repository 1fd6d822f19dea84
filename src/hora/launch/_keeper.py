"""Keeps a reaper while the job runs, which kills the job should this launcher be killed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hora.launch import _tree
from hora.launch._loop import Loop

__all__ = ["Keeper"]

REAPERS = 5
"""How often the reaper is started: something that kills it each time is not answered for ever."""


class Keeper:
    """Starts a reaper, and another one should it be killed before the job has ended.

    Args:
        job: the mark of the job's processes.
        pids: of its ranks.
        run: the run directory, where a reaper tells what it did.
        loop: notices the reaper's end.
        complain: called with a sentence when none stays alive.
    """

    def __init__(
        self, job: str, pids: Sequence[int], run: Path, loop: Loop, *, complain: Callable[[str], None]
    ) -> None:
        self._job, self._pids, self._run = job, pids, run
        self._loop = loop
        self._complain = complain
        self._started = 0
        self._close: Callable[[], None] | None = None
        self._start()

    def close(self) -> None:
        """The job has ended."""
        close, self._close = self._close, None
        if close is not None:
            close()

    def _start(self) -> None:
        reaper = _tree.Reaper(self._job, self._pids, self._run)
        self._started += 1
        fd = _tree.end_descriptor(reaper.process)

        def close() -> None:
            os.close(fd)
            reaper.close()

        def ended() -> None:
            self._loop.forget(fd)
            self.close()
            if self._started < REAPERS:
                self._start()
            else:
                self._complain(
                    "the reaper cannot stay alive; should this launcher be killed, look for leftovers"
                )

        self._close = close
        self._loop.watch(fd, ended)
