"""Checkpoints that could not be written or are not whole: ``checkpoint-failed``, ``checkpoint-damaged``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hora.guard.verdict import Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Saves"]


class Saves:
    """Passes on what rank 0 has found. The job goes on.

    Saves that fail for one reason, one after the other, are one finding; after one that succeeded, a
    failure is a new one.
    """

    kinds = frozenset({"checkpoint-failed", "checkpoint-damaged"})

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        kind = str(record["kind"])
        self._judge.find(
            Verdict(
                kind=kind,
                text=str(record["text"]),
                advice=str(record["advice"]),
                step=int(record["step"]),
                ranks=[rank],
            ),
            key=(kind, str(record["key"])),
        )

    def tick(self, now: float) -> None:
        return

    def ended(self, rank: int) -> None:
        return
