"""Is a rank slow by itself? The verdict ``straggler``.

An all-reduce makes all ranks look equally slow, so each is measured on its own time: that of its steps
without the time in which it waited for others, or was busy alone by declaration.

Time is cut into windows, and a rank must be slow in windows in a row. How many depends on the steps in them:
the mean of ten steps rarely misleads, a single long step does when samples differ in length. And it must be
slow for as long as makes it persistent, which a cold cache or a library that warms up is not; a run that is
shorter is judged at its end.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hora.guard.board import Head, Phase
from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Pace"]

RATIO = 1.5
"""A rank is slow when its own time per step is so many times the median of the others'."""

GAIN = 0.2
"""And when without it a step would be shorter by this part: otherwise nobody suffers from it."""

SECONDS = 1.0
"""The least length of a window."""

STEPS = 10
"""Steps of each rank that fill a window."""

LONGEST = 3.0
"""Seconds after which a window ends with fewer steps."""

WINDOWS = 3
"""So many full windows in a row show the same rank. By chance, with steps whose times vary by half: once in
500,000."""

SHORT_WINDOWS = 8
"""The same where one of them has fewer than :data:`STEPS` steps. By chance, with single steps of which one in
five is that slow: once in 400,000."""

FORGIVEN = 10
"""One window in so many may show no slow rank."""

PERSISTENT = (10.0, 300.0)
"""Seconds, at least and at most, that slowness must have lasted to be told while the training runs."""

LASTED = 0.1
"""The part of the training so far that it must have lasted, between these two: the more windows there have
been, the more often chance had its turn."""

PART = 0.5
"""At the end of a run, the part of it that slowness must have lasted to be told."""


@dataclass
class _Streak:
    """Windows that show the same slow rank.

    Attributes:
        rank: it.
        began: all ranks at their start.
        windows: how many there are.
        others: how many of them did not show it.
        full: whether all had enough steps.
    """

    rank: int
    began: Mapping[int, Head]
    windows: int = 0
    others: int = 0
    full: bool = True


class Pace:
    """Compares the ranks' own time per step."""

    kinds: frozenset[str] = frozenset()

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._first: Mapping[int, Head] = {}
        self._began: Mapping[int, Head] = {}
        self._last: Mapping[int, Head] = {}
        self._streak: _Streak | None = None
        self._told = False

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        return

    def ended(self, rank: int) -> None:
        if not self._judge.dead:
            self._finish()

    def tick(self, now: float) -> None:
        if self._told or self._judge.size < 2 or self._judge.gone or self._judge.dead:
            return
        heads = {rank: self._judge.board.head(rank) for rank in range(self._judge.size)}
        if any(head.phase == Phase.ABSENT or not head.step for head in heads.values()):
            self._finish()  # not training
            return
        if not self._began:
            self._began = heads
            self._first = self._first or heads
            return
        shares = {rank: _Share(self._began[rank], head) for rank, head in heads.items()}
        steps = min(share.steps for share in shares.values())
        seconds = min(share.seconds for share in shares.values())
        if steps < 1 or seconds < (SECONDS if steps >= STEPS else LONGEST):
            return
        self._last = heads
        self._look(shares, full=steps >= STEPS)
        self._began = heads

    def _finish(self) -> None:
        """The training is over, or a part of it."""
        if self._streak is not None and self._lasted(self._streak) >= PART * self._run():
            self._consider(self._streak)
        self._first, self._began, self._streak = {}, {}, None

    def _look(self, shares: Mapping[int, _Share], *, full: bool) -> None:
        slowest, ratio = _slowest(shares)
        slow = ratio > RATIO
        streak = self._streak
        if streak is None or (streak.rank != slowest and slow):
            streak = self._streak = _Streak(slowest, self._began) if slow else None
        if streak is None:
            return
        streak.windows += 1
        streak.others += not slow
        streak.full &= full
        if streak.others * FORGIVEN > streak.windows:
            self._streak = None
            return
        least, most = PERSISTENT
        if self._lasted(streak) >= min(max(least, LASTED * self._run()), most):
            self._consider(streak)

    def _lasted(self, streak: _Streak) -> float:
        return self._last[streak.rank].stepped - streak.began[streak.rank].stepped

    def _run(self) -> float:
        return self._last[0].stepped - self._first[0].stepped

    def _consider(self, streak: _Streak) -> None:
        shares = {rank: _Share(streak.began[rank], head) for rank, head in self._last.items()}
        slowest, ratio = _slowest(shares)
        enough = streak.windows >= (WINDOWS if streak.full else SHORT_WINDOWS)
        if enough and slowest == streak.rank and ratio > RATIO:
            self._tell(slowest, shares, ratio)

    def _tell(self, slowest: int, shares: Mapping[int, _Share], ratio: float) -> None:
        self._told = True
        slow = shares[slowest]
        others = {rank: share for rank, share in shares.items() if rank != slowest}
        by_data = slow.data - statistics.median(share.data for share in others.values())
        by_compute = slow.compute - statistics.median(share.compute for share in others.values())
        shown = [slowest, *list(others)[:7]]
        table = "; ".join(f"rank {rank}: {shares[rank]}" for rank in shown)
        more = f"; and {len(shares) - len(shown)} more ranks" if len(shares) > len(shown) else ""
        if by_data > by_compute:
            cause = "Most of the difference is waiting for data."
            advice = (
                "Look at what that rank reads from (its disk, its files' sizes), and give it loader "
                "processes: "
                "num_workers=2, say."
            )
        else:
            cause = "Most of the difference is its own computing."
            advice = (
                "Look at what else runs on that host and device, at clock limits and temperature there, "
                "and at work "
                "that the script does on that rank only."
            )
        self._judge.find(
            Verdict(
                kind="straggler",
                text=f"Rank {slowest} takes {min(ratio, 99.0):.1f} times as long for its own part of a "
                "step as the "
                f"others, which wait for it. Per step: {table}{more}. {cause}",
                advice=advice,
                ranks=[slowest],
                step=self._judge.step(slowest),
            ),
            key=("straggler",),
        )


class _Share:
    """How a rank's time went in a window, in seconds per step.

    Attributes:
        steps: of the rank.
        seconds: that they took.
    """

    def __init__(self, start: Head, end: Head) -> None:
        self.steps = end.step - start.step
        self.seconds = end.stepped - start.stepped
        steps = max(self.steps, 1)
        self.total = self.seconds / steps
        self.waited = (end.waited - start.waited) / steps
        self.own = max(self.total - self.waited, 0.0)
        self.data = min((end.data - start.data) / steps, self.own)
        self.compute = self.own - self.data

    def __str__(self) -> str:
        parts = {"data": self.data, "compute": self.compute, "waiting": self.waited}
        return ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in parts.items())


def _slowest(shares: Mapping[int, _Share]) -> tuple[int, float]:
    """The rank with most time of its own, and how many times that of the others; 0.0 if nobody suffers."""
    slowest = max(shares, key=lambda rank: shares[rank].own)
    others = [share for rank, share in shares.items() if rank != slowest]
    usual = statistics.median(share.own for share in others)
    if shares[slowest].own - usual < GAIN * shares[slowest].total:
        return slowest, 0.0
    return slowest, shares[slowest].own / usual if usual > 0 else float("inf")
