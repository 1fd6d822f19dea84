"""Timeline events of one rank, and how they are read back.

A rank appends events to ``events/rank-N.jsonl``; nothing is shared and nothing blocks. What is made of
them, a trace of all ranks on one clock, is in :mod:`hora.core.trace`.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["LIMIT_REACHED", "Event", "Recording", "Timeline", "read_events"]

FLUSH_EVERY = 512
"""Events buffered in memory between two writes."""

FLUSH_SECONDS = 2.0
"""Events of a longer time are written too; a killed rank loses at most the smaller of the two."""

LIMIT_REACHED = "timeline limit reached"

_encode = json.JSONEncoder(default=str).encode


class Timeline:
    """Events of one rank. With ``path=None`` nothing is recorded, at the cost of one test per event.

    Args:
        path: the file to append to.
        rank: becomes the process id in the trace.
        limit: events kept; later ones are only counted, so that a long run stays readable.
    """

    def __init__(self, path: Path | None, *, rank: int, limit: int = 100_000) -> None:
        self._path = path
        self._rank = rank
        self._limit = limit
        self._buffer: list[tuple[str, str, float, float, dict[str, Any] | None]] = []
        self._kept = 0
        self._flushed = time.time()
        self._heads: dict[tuple[str, str], str] = {}
        self.dropped = 0

    @property
    def enabled(self) -> bool:
        """Whether events are recorded."""
        return self._path is not None

    @contextlib.contextmanager
    def span(self, name: str, /, *, lane: str = "main", **details: Any) -> Iterator[None]:
        """Record how long the block takes. ``lane`` becomes a row of the trace."""
        if self._path is None:
            yield
            return
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time(), lane=lane, details=details or None)

    def add(
        self,
        name: str,
        start: float,
        stop: float,
        *,
        lane: str = "main",
        details: dict[str, Any] | None = None,
    ) -> None:
        """Record a span whose times (``time.time()``, seconds) were taken elsewhere."""
        if self._path is None:
            return
        if self._kept >= self._limit:
            self.dropped += 1
            return
        self._kept += 1
        self._buffer.append((name, lane, start, stop, details))
        if len(self._buffer) >= FLUSH_EVERY or stop - self._flushed > FLUSH_SECONDS:
            self.flush()

    def mark(self, name: str, *, lane: str = "main", **details: Any) -> None:
        """Record an instant."""
        now = time.time()
        self.add(name, now, now, lane=lane, details=details or None)

    def flush(self) -> None:
        """Write the buffered events."""
        self._flushed = time.time()
        if self._path is None or not self._buffer:
            return
        events, self._buffer = self._buffer, []  # another thread may be adding
        lines = "".join(self._line(*event) for event in events)
        try:
            with self._path.open("a") as file:
                file.write(lines)
        except OSError as error:
            # The training matters more than its timeline.
            print(f"hora: the timeline ends here, {self._path}: {error.strerror}", file=sys.stderr)
            self._path = None

    def close(self) -> None:
        """Write what is left, and how many events were dropped."""
        if self.dropped:
            self._limit += 1
            self.mark(LIMIT_REACHED, dropped=self.dropped)
            self.dropped = 0
        self.flush()

    def _line(self, name: str, lane: str, start: float, stop: float, details: dict[str, Any] | None) -> str:
        # Written by hand: a step has some ten events, and a general encoder takes three times as long.
        head = self._heads.get((name, lane))
        if head is None:
            head = self._heads[name, lane] = f'{{"name": {_encode(name)}, "lane": {_encode(lane)}, "start": '
        return f'{head}{start!r}, "stop": {stop!r}, "args": {_encode(details) if details else "{}"}}}\n'


class Event(NamedTuple):  # there may be a million of them
    """One span, or an instant where ``stop`` is ``start``; seconds since 1970 on the rank's own clock."""

    name: str
    lane: str
    start: float
    stop: float
    args: dict[str, Any]


@dataclass(kw_only=True)
class Recording:
    """What one rank left.

    Attributes:
        events: in the order in which they were written, which is that of their ends.
        malformed: lines that could not be read; a killed rank may leave half a line.
        dropped: events that the rank did not keep, because it had reached its limit.
    """

    events: list[Event] = field(default_factory=list)
    malformed: int = 0
    dropped: int = 0


def read_events(file: Path) -> Recording:
    """Read a rank's file, in whatever state it is. A file that is not there holds nothing."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Recording()
    lines = [line for line in text.split("\n") if line]
    recording = Recording()
    try:
        records = json.loads(f"[{','.join(lines)}]")  # all at once is three times as fast
    except (ValueError, RecursionError):
        records = [_parse(line) for line in lines]
    for record in records:
        event = _event(record)
        if event is None:
            recording.malformed += 1
        elif event.name == LIMIT_REACHED:
            dropped = event.args.get("dropped")
            recording.dropped += dropped if isinstance(dropped, int) else 0
        else:
            recording.events.append(event)
    return recording


def _parse(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _event(record: Any) -> Event | None:
    try:
        name, lane, start, stop = record["name"], record["lane"], record["start"], record["stop"]
        args = record["args"]
    except (TypeError, KeyError, IndexError):
        return None
    if type(start) is not float or type(stop) is not float:
        if type(start) not in (int, float) or type(stop) not in (int, float):
            return None
        if max(abs(start), abs(stop)) > 1e12:
            return None
        start, stop = float(start), float(stop)
    if not math.isfinite(start - stop) or not abs(start) < 1e12:
        return None
    if type(name) is not str or type(lane) is not str or type(args) is not dict:
        return None
    # A clock that was set back in between makes an instant of a span.
    return Event(name, lane, start, stop if stop > start else start, args)
