"""Is a rank slow by itself? The verdict ``straggler``.

An all-reduce makes all ranks look equally slow, so each is measured on its own time: that of its steps
without the time in which it waited for others, or was busy alone by declaration.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hora.guard.board import Head, Phase
from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Pace"]

RATIO = 1.5
"""A rank is slow when its own time per step is so many times the median of the others'."""

WAITED = 0.1
"""The others must spend at least this part of their time waiting: otherwise nobody suffers from it."""


class Pace:
    """Compares the ranks' own time per step over windows.

    Args:
        seconds: the least length of a window.
        steps: the fewest steps of each rank in it.
        windows: so many in a row must show the same rank.
    """

    kinds: frozenset[str] = frozenset()

    def __init__(self, judge: Judge, *, seconds: float = 1.0, steps: int = 10, windows: int = 3) -> None:
        self._judge = judge
        self._seconds, self._steps, self._windows = seconds, steps, windows
        self._began: dict[int, Head] = {}
        self._slow: list[int] = []
        self._told = False

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        return

    def ended(self, rank: int) -> None:
        self._began.clear()

    def tick(self, now: float) -> None:
        if self._told or self._judge.size < 2 or self._judge.gone or self._judge.dead:
            return
        heads = {rank: self._judge.board.head(rank) for rank in range(self._judge.size)}
        if any(head.phase == Phase.ABSENT or not head.step for head in heads.values()):
            self._began.clear()  # not training
            return
        if len(self._began) < len(heads):
            self._began = heads
            return
        spans = {rank: (self._began[rank], head) for rank, head in heads.items()}
        if any(
            end.step - start.step < self._steps or end.stepped - start.stepped < self._seconds
            for start, end in spans.values()
        ):
            return
        self._began = heads
        self._look({rank: _Share(start, end) for rank, (start, end) in spans.items()})

    def _look(self, shares: Mapping[int, _Share]) -> None:
        slowest = max(shares, key=lambda rank: shares[rank].own)
        others = [share for rank, share in shares.items() if rank != slowest]
        usual = statistics.median(share.own for share in others)
        waits = statistics.median(share.waited / share.total for share in others)
        if shares[slowest].own <= RATIO * usual or waits < WAITED:
            self._slow.clear()
            return
        if self._slow and self._slow[-1] != slowest:
            self._slow.clear()
        self._slow.append(slowest)
        if len(self._slow) >= self._windows:
            self._tell(slowest, shares, shares[slowest].own / usual if usual > 0 else float("inf"))

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
    """How a rank's time went in a window, in seconds per step."""

    def __init__(self, start: Head, end: Head) -> None:
        steps = end.step - start.step
        self.total = (end.stepped - start.stepped) / steps
        self.waited = (end.waited - start.waited) / steps
        self.own = max(self.total - self.waited, 0.0)
        self.data = min((end.data - start.data) / steps, self.own)
        self.compute = self.own - self.data

    def __str__(self) -> str:
        parts = {"data": self.data, "compute": self.compute, "waiting": self.waited}
        return ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in parts.items())
