"""Sets of time, as sorted lists of disjoint intervals, so that overlapping spans are counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["Interval", "length", "minus", "union"]

Interval = tuple[float, float]
"""Start and stop, start below stop."""


def union(spans: Iterable[Interval]) -> list[Interval]:
    """All time that is inside any of the spans. Empty and reversed ones hold none."""
    merged: list[Interval] = []
    start = stop = math.nan
    for begin, end in sorted(span for span in spans if span[0] < span[1]):
        if begin <= stop:
            stop = max(stop, end)
            continue
        if start < stop:
            merged.append((start, stop))
        start, stop = begin, end
    if start < stop:
        merged.append((start, stop))
    return merged


def minus(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """The time of ``whole`` that is not in ``taken``; both as :func:`union` returns them."""
    left: list[Interval] = []
    index = 0
    for start, stop in whole:
        while index < len(taken) and taken[index][1] <= start:
            index += 1
        at, begin = index, start
        while at < len(taken) and taken[at][0] < stop:
            if begin < taken[at][0]:
                left.append((begin, taken[at][0]))
            begin = max(begin, taken[at][1])
            at += 1
        if begin < stop:
            left.append((begin, stop))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Seconds in disjoint intervals, rounded once."""
    return math.fsum(stop - start for start, stop in intervals)
