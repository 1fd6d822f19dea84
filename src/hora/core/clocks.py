"""One clock for all ranks: how far each host's clock is from that of the first rank, and how sure that is.

Ranks of several hosts stamp their events with clocks that differ by milliseconds, sometimes by seconds.
Their collectives tell by how much. No rank can leave an all-reduce before every rank has entered it, so
for each one, with ``offset`` the rank's clock minus the reference's,

    offset <= rank's end - reference's start      and      offset >= rank's start - reference's end.

All of them together leave an interval for the offset, about as wide as the fastest all-reduce is long.
This is the argument of Marzullo and Owicki, "Maintaining the time in a distributed system" (1983), by which
NTP bounds its error. Inside that interval the estimate is the median of the differences of the ends: all
wait for the last one, so all leave at nearly the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from hora.core.events import Event, Recording

__all__ = ["Clock", "clocks"]

TOGETHER = frozenset(
    {
        "average gradients",
        "allgather",
        "allgather_object",
        "allreduce",
        "alltoall",
        "barrier",
        "mean",
        "reducescatter",
    }
)
"""Events that no rank ends before every rank has begun it. A broadcast is none: its root may leave first."""

MOST_PAIRS = 4000
"""Of one kind of event, spread over the run; more would not narrow the interval visibly."""

DRIFT_SECONDS = 10.0
"""Runs that are shorter are too short to see two clocks drift apart: quartz differs by some 1e-5."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How a rank's clock stands to the reference's.

    Attributes:
        offset: seconds by which it is ahead, at ``since``.
        drift: seconds per second by which it gains.
        since: the moment on this rank's clock.
        error: seconds; the true offset is within ``offset`` plus or minus this. Infinite when no event
            was found that both ranks took part in.
        events: how many such events there were.
    """

    offset: float = 0.0
    drift: float = 0.0
    since: float = 0.0
    error: float = math.inf
    events: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the clocks may be the same, as on one host: then times are left as they are."""
        return self.error == math.inf or (abs(self.offset) <= self.error and not self.drift)

    def common(self, time: float) -> float:
        """A time of this rank on the reference's clock."""
        if self.agrees:
            return time
        return time - self.offset - self.drift * (time - self.since)


class _Pair(NamedTuple):
    """One event on both clocks: where its end was seen, and what it says about the offset."""

    time: float
    ends: float
    low: float
    high: float


def clocks(recordings: Mapping[int, Recording]) -> dict[int, Clock]:
    """The clock of each rank that recorded something; the lowest such rank is the reference."""
    spans = {rank: _together(recording.events) for rank, recording in recordings.items() if recording.events}
    if not spans:
        return {}
    reference = min(spans)
    found = {reference: Clock(error=0.0)}
    for rank, own in spans.items():
        if rank != reference:
            found[rank] = _clock(own, spans[reference])
    return {rank: found[rank] for rank in sorted(found)}


Key = tuple[object, int]


def _together(events: Sequence[Event]) -> dict[str, dict[Key, Event]]:
    """The events that all ranks shared: name -> (cycle or None, how many of the kind came before) -> event.

    The cycle tells gradients of one backward from those of another also where a rank recorded elsewhere
    for a while.
    """
    found: dict[str, dict[Key, Event]] = {}
    counts: dict[tuple[str, object], int] = {}
    for event in events:
        name, args = event.name, event.args
        if name not in TOGETHER or "process_set" in args:
            continue
        cycle = args.get("cycle") if isinstance(args.get("cycle"), int) else None
        number = counts.get((name, cycle), 0)
        counts[name, cycle] = number + 1
        if args.get("bytes") != 0 or name == "barrier":  # nothing to send, nobody to wait for
            found.setdefault(name, {})[cycle, number] = event
    return found


def _clock(own: dict[str, dict[Key, Event]], reference: dict[str, dict[Key, Event]]) -> Clock:
    best = Clock()
    for name, events in own.items():
        others = reference.get(name, {})
        keys = [key for key in events if key in others]
        stride = max(1, len(keys) // MOST_PAIRS)
        pairs = [_pair(events[key], others[key]) for key in keys[::stride]]
        if not pairs:
            continue
        for drift in _drifts(pairs):
            clock = _fit(pairs, drift)
            # A drift must explain clearly more than none does.
            if clock.error < best.error * (0.5 if drift else 1.0):
                best = clock
    return best


def _pair(own: Event, reference: Event) -> _Pair:
    return _Pair(own.stop, own.stop - reference.stop, own.start - reference.stop, own.stop - reference.start)


def _drifts(pairs: Sequence[_Pair]) -> list[float]:
    """No drift; and for long runs the slope between the first and the last third, after Tukey."""
    third = len(pairs) // 3
    if third < 5 or pairs[-1].time - pairs[0].time < DRIFT_SECONDS:
        return [0.0]
    first, last = pairs[:third], pairs[-third:]
    rise = median(pair.ends for pair in last) - median(pair.ends for pair in first)
    run = median(pair.time for pair in last) - median(pair.time for pair in first)
    return [0.0, rise / run] if run > 0 and rise else [0.0]


def _fit(pairs: Sequence[_Pair], drift: float) -> Clock:
    since = pairs[0].time
    low = max(pair.low - drift * (pair.time - since) for pair in pairs)
    high = min(pair.high - drift * (pair.time - since) for pair in pairs)
    middle = median(pair.ends - drift * (pair.time - since) for pair in pairs)
    if low <= high:
        middle = min(max(middle, low), high)
    error = max(abs(middle - low), abs(high - middle))
    return Clock(offset=middle, drift=drift, since=since, error=error, events=len(pairs))
