"""One rank's stdout and stderr on their way to its log and to the console."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import IO

from hora.launch import _tree
from hora.launch._loop import Loop, Timer
from hora.launch.output import Console, ConsoleClosedError, Lines, Log, Tail

__all__ = ["Streams"]

CHUNK = 1 << 18
LAST_CHUNKS = 64
"""Reads from the pipe of a rank that has ended: more than it holds, as what was forked may write for ever."""


class Streams:
    """Reads what a rank prints.

    Args:
        rank: its number.
        process: the rank, with non-blocking pipes; of one on another host it comes by :meth:`feed`.
        log: where the bytes go.
        console: where whole lines go.
        redraw: fires when the state of an unfinished progress bar is to be shown.
        closed: called when nobody reads the console any more.
    """

    def __init__(
        self,
        rank: int,
        process: _tree.Process,
        *,
        log: Log,
        console: Console,
        loop: Loop,
        redraw: Timer,
        closed: Callable[[], None],
    ) -> None:
        self.log = log
        self._rank = rank
        self._console = console
        self._loop = loop
        self._redraw = redraw
        self._closed = closed
        self._tail = Tail()
        self._lines = (Lines(), Lines())
        self._pipes: dict[int, IO[bytes]] = {  # 0: stdout, 1: stderr; taken out at its end
            which: pipe for which, pipe in enumerate((process.stdout, process.stderr)) if pipe is not None
        }

    def watch(self) -> None:
        """Begin to read."""
        for which, pipe in self._pipes.items():
            self._loop.watch(pipe.fileno(), functools.partial(self._read, which))

    def feed(self, which: int, data: bytes) -> None:
        """It has printed this, on stdout (0) or stderr (1)."""
        self.log.feed(which, data)
        self._show(which, self._lines[which].feed(data, time.monotonic()))
        redraw = self._lines[which].redraw
        if redraw is not None:
            self._redraw.by(redraw)

    def drain(self) -> None:
        """Take in what a rank that has ended left in its pipes."""
        for which in (0, 1):
            for _ in range(LAST_CHUNKS):
                if which not in self._pipes or not self._read(which):
                    break

    def tail(self) -> list[str]:
        """The last lines on stderr."""
        return self._tail.text()

    def draw(self, now: float) -> None:
        """Show an unfinished bar whose time has come."""
        for which, lines in enumerate(self._lines):
            if lines.redraw is not None and now >= lines.redraw:
                self._show(which, lines.unfinished(now))
            if lines.redraw is not None:
                self._redraw.by(lines.redraw)

    def close(self) -> None:
        """Show and keep the rest."""
        self.drain()
        for which, lines in enumerate(self._lines):
            self._show(which, lines.close())
        for pipe in self._pipes.values():
            self._loop.forget(pipe.fileno())
            pipe.close()
        self._pipes.clear()
        self.log.close()

    def _read(self, which: int) -> bool:
        """Take in what is there; False when the pipe is empty or at its end."""
        try:
            data = os.read(self._pipes[which].fileno(), CHUNK)
        except BlockingIOError:
            return False
        if data:
            self.feed(which, data)
            return True
        pipe = self._pipes.pop(which)
        self._loop.forget(pipe.fileno())
        pipe.close()
        self._show(which, self._lines[which].close())
        return False

    def _show(self, which: int, whole: bytes) -> None:
        if which == 1:
            self._tail.feed(whole)
        try:
            self._console.lines(self._rank, which, whole)
        except ConsoleClosedError:
            self._closed()
