"""Timeline events of one rank, and their merge into a Chrome trace.

A rank appends events to ``events/rank-N.jsonl``; nothing is shared and nothing blocks. When the run
ends, :func:`merge` joins all files into ``timeline.json``, which Perfetto and ``chrome://tracing``
open. The format is Google's "Trace Event Format": times in microseconds, ``ph`` "X" for a span, "i"
for an instant, "M" for names.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hora.core.rundir import RunDirectory, disk_errors

__all__ = ["Timeline", "merge", "write_trace"]

FLUSH_EVERY = 512
"""Events buffered in memory between two writes; a killed rank loses at most these."""


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
        self.dropped = 0

    @property
    def enabled(self) -> bool:
        """Whether events are recorded."""
        return self._path is not None

    @contextlib.contextmanager
    def span(self, name: str, *, lane: str = "main", **details: Any) -> Iterator[None]:
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
        if len(self._buffer) >= FLUSH_EVERY:
            self.flush()

    def mark(self, name: str, *, lane: str = "main", **details: Any) -> None:
        """Record an instant."""
        now = time.time()
        self.add(name, now, now, lane=lane, details=details or None)

    def flush(self) -> None:
        """Write the buffered events."""
        if self._path is None or not self._buffer:
            return
        events, self._buffer = self._buffer, []  # another thread may be adding
        lines = [
            json.dumps({"name": name, "lane": lane, "start": start, "stop": stop, "args": details or {}})
            for name, lane, start, stop, details in events
        ]
        try:
            with self._path.open("a") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            # The training matters more than its timeline.
            print(f"hora: the timeline ends here, {self._path}: {error.strerror}", file=sys.stderr)
            self._path = None

    def close(self) -> None:
        """Write what is left, and how many events were dropped."""
        if self.dropped:
            self._limit += 1
            self.mark("timeline limit reached", dropped=self.dropped)
            self.dropped = 0
        self.flush()


def merge(run: RunDirectory) -> Path | None:
    """Join the ranks' event files into ``timeline.json``; None when no rank recorded anything."""
    files = sorted((run.path / "events").glob("rank-*.jsonl"), key=lambda file: int(file.stem[5:]))
    if not files:
        return None
    write_trace({int(file.stem[5:]): file for file in files}, run.timeline)
    return run.timeline


def write_trace(files: Mapping[int, Path], path: Path) -> None:
    """Join event files, given by rank, into a Chrome trace at ``path``; its time starts at 0."""
    events = [event for rank, file in files.items() for event in _trace_events(file, rank)]
    start = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 3)
    with disk_errors(path.parent):
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _trace_events(file: Path, rank: int) -> list[dict[str, Any]]:
    lanes: dict[str, int] = {}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    ]
    for line in file.read_text().splitlines():
        with contextlib.suppress(ValueError):  # a killed rank may leave half a line
            record = json.loads(line)
            if record["lane"] not in lanes:
                lanes[record["lane"]] = len(lanes)
                events.append(
                    {
                        "ph": "M",
                        "name": "thread_name",
                        "pid": rank,
                        "tid": lanes[record["lane"]],
                        "args": {"name": record["lane"]},
                    }
                )
            event = {
                "name": record["name"],
                "cat": record["lane"],
                "pid": rank,
                "tid": lanes[record["lane"]],
                "ts": record["start"] * 1e6,
                "args": record["args"],
            }
            if record["stop"] > record["start"]:
                event |= {"ph": "X", "dur": round((record["stop"] - record["start"]) * 1e6, 3)}
            else:
                event |= {"ph": "i", "s": "t"}
            events.append(event)
    return events
