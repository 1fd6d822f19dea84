"""The pipe on which ranks say that they have failed, before they end: a rank can hang on its way out.

What they tell otherwise comes there too, as a line of its own kind (see :mod:`hora.core.notices`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from hora.core.rundir import RunDirectory
from hora.launch._loop import Loop
from hora.launch.failure import parse_record, read_record

__all__ = ["News"]

CHUNK = 1 << 16


class News:
    """Takes in failure records.

    Args:
        fd: the pipe's read end, non-blocking; whoever made it closes it.
        tell: called with a rank and its record when the rank says that it has failed.
        notice: called with whatever else a rank tells.
    """

    def __init__(
        self,
        fd: int,
        run: RunDirectory,
        loop: Loop,
        *,
        tell: Callable[[int, Mapping[str, Any]], None],
        notice: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._fd = fd
        self._run = run
        self._loop = loop
        self._tell = tell
        self._notice = notice
        self._rest = b""
        self._records: dict[int, dict[str, Any]] = {}  # of ranks whose disk could not take the file
        self._open = True
        loop.watch(fd, self.read)

    def record(self, rank: int) -> dict[str, Any] | None:
        """What a rank has left about its failure; None when it has not failed, or could not say how."""
        return read_record(self._run.failure(rank)) or self._records.get(rank)

    def read(self) -> None:
        """Take in what is there: a line is a rank's number, or the record that no file could take."""
        if not self._open:
            return
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        if not data:  # all ranks have closed their ends
            self._open = False
            self._loop.forget(self._fd)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode("utf-8", "replace"))

    def hear(self, rank: int, record: dict[str, Any]) -> None:
        """A rank has failed, and left this record where no file of it is here."""
        self._records[rank] = record
        self._tell(rank, record)

    def _take(self, line: str) -> None:
        record = parse_record(line)
        if record is not None:
            rank = record.get("rank")
            if isinstance(rank, int):
                self.hear(rank, record)
        elif line.isdecimal():
            record = self.record(int(line))
            if record is not None:
                self._tell(int(line), record)
        elif line.startswith('{"notice"'):
            try:
                told = json.loads(line)
            except ValueError:  # any program of the job can write into the pipe
                return
            self._notice(told)
