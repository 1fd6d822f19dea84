"""A verdict: one finding of the guard, in words that a newcomer understands."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["KINDS", "Earlier", "Verdict"]

KINDS: Mapping[str, str] = {
    "late-rank": "A rank keeps the others waiting",
    "mismatched-calls": "The ranks call different collectives",
    "subset-call": "Only some ranks call a collective",
    "rank-failed": "A rank failed",
    "diverged": "The ranks' models differ",
    "same-data": "Ranks train on the same samples",
    "same-order": "Every epoch has the same order",
    "same-noise": "Ranks draw the same random numbers",
    "different-init": "The ranks' models start differently",
    "frozen-parameters": "Trainable parameters do not move",
    "not-finite": "A gradient or loss is not finite",
    "plan": "What the training is going to do",
    "impossible-plan": "The training cannot go as planned",
    "straggler": "A rank is slower than the others",
    "checkpoint-failed": "A checkpoint could not be written",
    "checkpoint-damaged": "A checkpoint is not whole",
}
"""Every kind of verdict by its slug, with its headline."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What has been said about the same before.

    Attributes:
        verdict: the earlier verdict, whose place the new one takes.
        line: what is left to say.
    """

    verdict: Verdict
    line: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One finding.

    Attributes:
        kind: a slug of :data:`KINDS`.
        text: one paragraph: what, which ranks, which call, since when, the likely cause.
        advice: what to do, as an imperative sentence.
        ranks: the ranks at fault, or all that it concerns.
        hosts: their hosts, each once.
        call: the collective, such as ``allreduce 'loss' float32 (3,) sum``; None where there is none.
        where: ``file:line`` of the user's own code; None where no line is at fault.
        step: steps that the optimizer had made, where that is known.
        time: when it was found, ``time.time()`` in seconds.
    """

    kind: str
    text: str
    advice: str = ""
    ranks: Sequence[int] = ()
    hosts: Sequence[str] = ()
    call: str | None = None
    where: str | None = None
    step: int | None = None
    time: float = field(default_factory=time.time)

    @property
    def paragraph(self) -> str:
        """The verdict as it is shown: headline, text, advice, and where to read more."""
        parts = [f"{KINDS[self.kind]}. {self.text}"]
        if self.advice:
            parts.append(self.advice)
        return "\n".join([*parts, f"(More: hora explain {self.kind})"])

    def line(self) -> str:
        """One line of ``verdicts.jsonl``."""
        return json.dumps(asdict(self) | {"ranks": list(self.ranks), "hosts": list(self.hosts)}) + "\n"

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Verdict:
        """The verdict of a line of ``verdicts.jsonl``, decoded."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})
