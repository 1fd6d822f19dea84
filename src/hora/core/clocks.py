"""One clock for all ranks: how far each host's clock is from that of the first rank, and how sure that is.

Ranks of several hosts stamp their events with clocks that differ by milliseconds, sometimes by seconds.
Their collectives tell by how much. No rank can leave an all-reduce before every rank has entered it, so
for each one, with ``offset`` the rank's clock minus the reference's,

    offset <= rank's end - reference's start      and      offset >= rank's start - reference's end.

All of them together leave an interval for the offset, which is certain. This is the argument of Marzullo
and Owicki, "Maintaining the time in a distributed system" (1983), by which NTP bounds its error. Inside that
interval the estimate is the median of the differences of the ends: all wait for the last one, so all leave at
nearly the same moment. How much these differences scatter tells how good the estimate is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


FEWEST = 5
"""Events below which a scatter says nothing, and the certain interval is given in its place."""

SMALLEST = 1e-3
"""Seconds. Ranks that share a core leave a collective one after the other; less is no clock's doing."""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How a rank's clock stands to the reference's.

    Attributes:
        offset: seconds by which it is ahead, at ``since``.
        drift: seconds per second by which it gains.
        since: the moment on this rank's clock.
        error: seconds; the standard deviation of the differences from which ``offset`` was taken. Infinite
            when no event was found that both ranks took part in.
        bound: seconds; the true offset cannot be further from ``offset`` than this.
        events: how many events there were.
        shared: whether both ranks ran on one host, so that they have one clock.
    """

    offset: float = 0.0
    drift: float = 0.0
    since: float = 0.0
    error: float = math.inf
    bound: float = math.inf
    events: int = 0
    shared: bool = False

    @property
    def agrees(self) -> bool:
        """Whether the clocks are, or may be, the same: then times are left as they are."""
        if self.shared or self.error == math.inf:
            return True
        return abs(self.offset) <= max(min(4 * self.error, self.bound), SMALLEST) and not self.drift

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
    blocking: bool


def clocks(recordings: Mapping[int, Recording]) -> dict[int, Clock]:
    """The clock of each rank that recorded something; the lowest such rank is the reference.

    Ranks of one host have one clock: that of the rank among them that tells it best.
    """
    recordings = {rank: one for rank, one in sorted(recordings.items()) if one.events}
    if not recordings:
        return {}
    hosts = {rank: _host(one, rank) for rank, one in recordings.items()}
    spans = {rank: _together(one.events) for rank, one in recordings.items()}
    reference = next(iter(spans))
    found = {reference: Clock(error=0.0, bound=0.0, shared=True)}
    best: dict[object, Clock] = {}
    for rank, own in spans.items():
        if rank == reference:
            continue
        found[rank] = _clock(own, spans[reference])
        if hosts[rank] == hosts[reference]:
            found[rank] = replace(found[rank], shared=True)
        else:
            best[hosts[rank]] = min(best.get(hosts[rank], found[rank]), found[rank], key=_quality)
    return {rank: best.get(hosts[rank], clock) for rank, clock in found.items()}


def _host(recording: Recording, rank: int) -> object:
    """The host's name from the mark of ``init``; the rank stands for itself where there is none."""
    names = (event.args.get("host") for event in recording.events if event.name == "init")
    return next((name for name in names if isinstance(name, str)), rank)


def _quality(clock: Clock) -> tuple[float, float]:
    return clock.error, clock.bound


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
        cycle = args.get("cycle")
        cycle = cycle if isinstance(cycle, int) else None
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
        # Of the buckets of one backward only the last holds the script up; the end of an earlier one is
        # when the script came to look.
        last = dict(keys)
        stride = max(1, len(keys) // MOST_PAIRS)
        pairs = [
            _pair(events[key], others[key], blocking=key[0] is None or last[key[0]] == key[1])
            for key in keys[::stride]
        ]
        if not any(pair.blocking for pair in pairs):
            continue
        for drift in _drifts(pairs):
            clock = _fit(pairs, drift)
            # A drift must explain clearly more than none does.
            if _quality(clock) < (best.error * (0.5 if drift else 1.0), best.bound):
                best = clock
    return best


def _pair(own: Event, reference: Event, *, blocking: bool) -> _Pair:
    return _Pair(
        time=own.stop,
        ends=own.stop - reference.stop,
        low=own.start - reference.stop,
        high=own.stop - reference.start,
        blocking=blocking,
    )


def _drifts(pairs: Sequence[_Pair]) -> list[float]:
    """No drift; and for long runs the slope between the first and the last third, after Tukey."""
    blocking = [pair for pair in pairs if pair.blocking]
    third = len(blocking) // 3
    if third < FEWEST or blocking[-1].time - blocking[0].time < DRIFT_SECONDS:
        return [0.0]
    first, last = blocking[:third], blocking[-third:]
    rise = median(pair.ends for pair in last) - median(pair.ends for pair in first)
    run = median(pair.time for pair in last) - median(pair.time for pair in first)
    return [0.0, rise / run] if run > 0 and rise else [0.0]


def _fit(pairs: Sequence[_Pair], drift: float) -> Clock:
    since = pairs[0].time
    low = max(pair.low - drift * (pair.time - since) for pair in pairs)
    high = min(pair.high - drift * (pair.time - since) for pair in pairs)
    ends = [pair.ends - drift * (pair.time - since) for pair in pairs if pair.blocking]
    middle = median(ends)
    # The median distance from the median is 0.6745 standard deviations of a normal distribution.
    error = median(abs(end - middle) for end in ends) / 0.6745
    if low <= high:
        middle = min(max(middle, low), high)
    bound = max(abs(middle - low), abs(high - middle))
    return Clock(
        offset=middle,
        drift=drift,
        since=since,
        error=error if len(ends) >= FEWEST else bound,
        bound=bound,
        events=len(pairs),
    )
