"""The ranks' timelines on one clock, as a Chrome trace, which Perfetto and ``chrome://tracing`` open.

The format is Google's "Trace Event Format": times in microseconds, ``ph`` "X" for a span, "i" for an
instant, "M" for names. Each rank is a process of the trace and each lane a row of it. Spans of a row must
nest, or the viewers drop some, so spans that overlap otherwise get further rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hora.core.clocks import Clock, clocks
from hora.core.events import Event, Recording, read_events
from hora.core.rundir import RunDirectory, replace_text

__all__ = ["merge", "read_run", "write_trace"]

LANES = ("steps", "main", "data", "collectives", "gradients", "background")
"""Rows come in this order, others behind."""

_encode = json.JSONEncoder(default=str).encode


def read_run(run: RunDirectory) -> dict[int, Recording]:
    """What each rank recorded, by rank; ranks without a single event are left out."""
    found = {}
    for file in (run.path / "events").glob("rank-*.jsonl"):
        rank = file.stem.removeprefix("rank-")
        if rank.isdecimal():
            recording = read_events(file)
            if recording.events:
                found[int(rank)] = recording
    return dict(sorted(found.items()))


def merge(run: RunDirectory) -> Path | None:
    """Join the ranks' event files into ``timeline.json``; None when no rank recorded anything."""
    recordings = read_run(run)
    if not recordings:
        return None
    write_trace(recordings, run.timeline, standing=clocks(recordings))
    return run.timeline


def write_trace(
    recordings: Mapping[int, Recording], path: Path, *, standing: Mapping[int, Clock] | None = None
) -> None:
    """Join recordings, given by rank, into a Chrome trace at ``path``; its time starts at 0.

    Args:
        recordings: what each rank left.
        path: the file, which is replaced in one step.
        standing: the ranks' clocks; None takes their times as they are.

    Raises:
        RunDirectoryError: it cannot be written (DiskFullError: no space).
    """
    standing = standing or {}
    clock = {rank: standing.get(rank, Clock()) for rank in recordings}
    origin = min(
        (clock[rank].common(event.start) for rank, one in recordings.items() for event in one.events),
        default=0.0,
    )
    lines: list[str] = []
    for rank, recording in recordings.items():
        lines += _rank(rank, recording.events, clock[rank], origin)
    about = {
        "clocks": {
            str(rank): {
                "offset_s": one.offset,
                "drift": one.drift,
                "error_s": one.error,
                "bound_s": one.bound,
            }
            for rank, one in standing.items()
            if one.error < float("inf")
        }
    }
    replace_text(
        path,
        '{"displayTimeUnit": "ms", "otherData": '
        + _encode(about)
        + ', "traceEvents": [\n'
        + ",\n".join(lines)
        + "\n]}\n",
    )


def _rank(rank: int, events: list[Event], clock: Clock, origin: float) -> Iterator[str]:
    def name(kind: str, row: int, **args: Any) -> str:
        return _encode({"ph": "M", "name": kind, "pid": rank, "tid": row, "args": args})

    yield name("process_name", 0, name=f"rank {rank}")
    yield name("process_sort_index", 0, sort_index=rank)
    rows = _Rows()
    heads: dict[tuple[str, str], str] = {}
    lines: list[str] = []
    shift = None if not clock.agrees else -origin
    # Outer spans first: the rows are filled from left to right.
    for event in sorted(events, key=lambda one: (one.start, -one.stop)):
        if shift is None:
            begin = round((clock.common(event.start) - origin) * 1e9)
            end = round((clock.common(event.stop) - origin) * 1e9)
        else:
            begin, end = round((event.start + shift) * 1e9), round((event.stop + shift) * 1e9)
        row = rows.place(event.lane, begin, end)
        head = heads.get((event.name, event.lane))
        if head is None:
            head = f'{{"name": {_encode(event.name)}, "cat": {_encode(event.lane)}, "pid": {rank}, "args": '
            heads[event.name, event.lane] = head
        args = _encode(event.args) if event.args else "{}"
        kind = f'"X", "dur": {(end - begin) / 1000}' if end > begin else '"i", "s": "t"'
        lines.append(f'{head}{args}, "tid": {row}, "ts": {begin / 1000}, "ph": {kind}}}')
    for row, (lane, number) in enumerate(rows.names):
        place = LANES.index(lane) if lane in LANES else len(LANES)
        yield name("thread_name", row, name=lane if number == 0 else f"{lane} {number + 1}")
        yield name("thread_sort_index", row, sort_index=place * 100 + number)
    yield from lines


class _Rows:
    """Gives each span the first row of its lane in which it nests."""

    def __init__(self) -> None:
        self.names: list[tuple[str, int]] = []
        self._lanes: dict[str, list[tuple[int, list[int]]]] = {}

    def place(self, lane: str, begin: int, end: int) -> int:
        rows = self._lanes.setdefault(lane, [])
        for row, open_ends in rows:
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                open_ends.append(end)
                return row
        rows.append((len(self.names), [end]))
        self.names.append((lane, len(rows) - 1))
        return len(self.names) - 1
