"""What the training is going to do, and plans that cannot be: ``plan`` and ``impossible-plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Plan"]


class Plan:
    """Passes on what the ranks have found; they know it all themselves."""

    kinds = frozenset({"plan", "impossible"})

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        if record["kind"] == "plan":
            self._judge.find(
                Verdict(kind="plan", text=str(record["text"]), ranks=list(range(self._judge.size))),
                key=("plan",),
            )
            return
        self._judge.find(
            Verdict(
                kind="impossible-plan",
                text=str(record["text"]),
                advice=str(record["advice"]),
                ranks=list(range(self._judge.size)),
                where=record["where"],
            ),
            key=("impossible-plan",),
            stop=bool(record["stop"]),
        )

    def tick(self, now: float) -> None:
        return

    def ended(self, rank: int) -> None:
        return
