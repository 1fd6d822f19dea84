"""Where a rank's time went: compute, communication, data and the rest, from its timeline.

A moment belongs to the first of these that holds:

- *communication*: the script stands in a collective and waits: for gradients at the end of a backward, or
  between the call of an operation and its return. What is averaged while backward goes on does not count.
- *data*: the script waits for the next batch.
- *compute*: it is inside a step: between a batch and the next, or in a backward or an optimizer. Where no
  loader of Hora and no ``track`` marks the steps, from the end of one optimizer step to that of the next; and
  where no optimizer does, from the first collective to the last.
- *other*: all else: getting ready, what happens between epochs, the end.

Each is a union of intervals, so overlapping spans count once, and the four add up to the wall time, which
goes from the rank's first event to its last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hora.core.events import Event, Recording
from hora.report._intervals import Interval, length, minus, union

__all__ = ["PARTS", "Shares", "mean_shares", "shares", "slowest"]

PARTS = ("compute", "communication", "data", "other")

NOTEWORTHY = 0.1
"""A rank that computes and loads so much longer than the median rank is named,"""

NOTEWORTHY_WALL = 0.03
"""if that makes so large a part of the wall time."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Seconds of one rank, or of the mean over several.

    Attributes:
        wall: from the first event to the last.
        data: 0 as well where nothing tells when the script waits for data (``data_seen`` is False).
    """

    wall: float
    compute: float
    communication: float
    data: float
    other: float
    data_seen: bool = True

    def parts(self) -> dict[str, float]:
        """The four of :data:`PARTS`, by name."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def work(self) -> float:
        """What the rank does on its own, apart from the others: compute and data."""
        return self.compute + self.data


def shares(recording: Recording) -> Shares:
    """Where the time of a rank went."""
    events = recording.events
    if not events:
        return Shares(wall=0.0, compute=0.0, communication=0.0, data=0.0, other=0.0, data_seen=False)
    origin = min(event.start for event in events)
    wall = max(event.stop for event in events) - origin
    communication = union(_shifted(_waits(events), origin, wall))
    loading = [(event.start, event.stop) for event in events if event.lane == "data"]
    data = minus(union(_shifted(loading, origin, wall)), communication)
    working = union(_shifted(_working(events), origin, wall))
    compute = minus(minus(working, communication), data)
    known = length(compute), length(communication), length(data)
    return Shares(
        wall=wall,
        compute=known[0],
        communication=known[1],
        data=known[2],
        other=max(0.0, wall - math.fsum(known)),
        data_seen=bool(loading),
    )


def mean_shares(ranks: Sequence[Shares]) -> Shares:
    """The mean over ranks, which adds up as each of them does."""
    count = max(1, len(ranks))
    sums = {name: math.fsum(getattr(one, name) for one in ranks) / count for name in ("wall", *PARTS)}
    return Shares(**sums, data_seen=any(one.data_seen for one in ranks))


def slowest(ranks: Mapping[int, Shares]) -> str:
    """A sentence about the rank that the others wait for; empty when all work about as long.

    It is told by what a rank does on its own: in a collective the fast ones wait, and all look alike.
    """
    works = {rank: one.work for rank, one in ranks.items() if one.work > 0}
    if len(works) < 2:
        return ""
    rank = max(works, key=lambda one: works[one])
    others = median(work for one, work in works.items() if one != rank)
    longer = works[rank] - others
    if longer < NOTEWORTHY * others or longer < NOTEWORTHY_WALL * ranks[rank].wall:
        return ""
    return (
        f"Rank {rank} computes and loads for {works[rank]:.3g} s, the others for {others:.3g} s (median): "
        "they wait for it."
    )


def _waits(events: Sequence[Event]) -> Iterator[Interval]:
    """When the script stood still for a collective."""
    for name, lane, start, stop, args in events:
        if lane == "main" and name.startswith("wait for "):
            yield start, stop
        elif lane == "collectives":
            started, waited = args.get("started"), args.get("waited")
            if isinstance(started, float) and isinstance(waited, float):
                # An asynchronous one: only its beginning and its end hold the script up.
                yield start, min(stop, start + started)
                yield max(start, stop - waited), stop
            else:
                yield start, stop


def _working(events: Sequence[Event]) -> Iterator[Interval]:
    """When the script was inside a step, whatever it did there."""
    marked = False
    edges: dict[str, list[float]] = {"optimizer": [], "wait for gradients": []}
    for name, lane, start, stop, _ in events:
        if lane == "steps":
            marked = True
            yield start, stop
        elif lane == "main":
            if name in ("backward", "optimizer"):
                yield start, stop
            if name in edges:
                edges[name].append(stop)
    if marked:
        return
    ends = edges["optimizer"] or edges["wait for gradients"]
    if ends:
        yield from pairwise(sorted(ends))
        return
    # Nothing tells one step from the next, as under --horovod: what lies between collectives is work.
    together = [one for one in events if one.lane in ("collectives", "background", "gradients")]
    if together:
        yield min(one.start for one in together), max(one.stop for one in together)


def _shifted(
    spans: Iterator[Interval] | Sequence[Interval], origin: float, wall: float
) -> Iterator[Interval]:
    """Times since ``origin``: sums of small numbers lose less."""
    for start, stop in spans:
        yield max(0.0, start - origin), min(wall, stop - origin)
