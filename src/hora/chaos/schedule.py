"""What is done to a job and when, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["KINDS", "MOMENTS", "Anchor", "Disturbance", "Kind", "Lengths", "Moment", "draw"]

Kind = Literal["kill", "stop", "delay", "disconnect", "fill-disk", "corrupt-checkpoint"]
Moment = Literal["start", "init", "step", "save", "last", "again"]
Anchor = Literal["started", "step", "saving", "saved", "disturbed", "seconds"]

KINDS: tuple[Kind, ...] = get_args(Kind)
MOMENTS: tuple[Moment, ...] = get_args(Moment)

SHARES: Mapping[Moment, float] = {
    "start": 0.08,
    "init": 0.1,
    "step": 0.5,
    "save": 0.14,
    "last": 0.08,
    "again": 0.1,
}
"""How often each moment is drawn. All but ``step`` are short in time, and are where most faults hide."""

START = 0.3
"""Seconds from the start of a rank in which it counts as starting."""

AGAIN = 3.0
"""Seconds after a disturbance in which the job is likely to be at work on what came of it."""

SHORT, LONG = 0.3, 3.0
"""Seconds of a delay, of a cut and of a full disk."""


FILLING = 0.2
"""Seconds that it may take to fill a disk."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What is known of the undisturbed run.

    Attributes:
        seconds: from the start of its first rank to its end.
        init: seconds from that start to the end of its first step.
        steps: that it made; 0: not known.
        step: median of the seconds between steps.
        saves: the steps by which its checkpoints are named, in the order in which it committed them.
        save: median of the seconds from the first file of a checkpoint to its marker.
    """

    seconds: float
    init: float = 0.0
    steps: int = 0
    step: float = 0.0
    saves: tuple[int, ...] = ()
    save: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One thing that is done to the job.

    Attributes:
        number: from 1, in the order in which they were drawn.
        kind: what.
        moment: why then.
        anchor: what is waited for.
        count: the how-manieth of these.
        after: seconds from there.
        choice: in [0, 1): which rank, file or bit.
        lasts: seconds; 0.0 for what does not end.
    """

    number: int
    kind: Kind
    moment: Moment
    anchor: Anchor
    count: int
    after: float
    choice: float
    lasts: float = 0.0

    @property
    def when(self) -> str:
        """The moment in words."""
        told = {
            "started": "the start of the ranks",
            "step": f"step {self.count}",
            "saving": f"the begin of save {self.count}",
            "saved": f"the end of save {self.count}",
            "disturbed": f"disturbance {self.count}",
            "seconds": "the start",
        }
        return f"{self.after:.3f} s after {told[self.anchor]}"


def draw(
    seed: int, counts: Mapping[Kind, int], known: Lengths, *, moments: Sequence[Moment] = MOMENTS
) -> list[Disturbance]:
    """The disturbances of a run; the same for the same arguments.

    Args:
        seed: of the draw.
        counts: how many of each kind.
        known: the undisturbed run.
        moments: those that may be drawn.
    """
    drawing = random.Random(f"hora chaos {seed}")
    wanted = [kind for kind in KINDS for _ in range(counts.get(kind, 0))]
    drawing.shuffle(wanted)
    return [_draw_one(drawing, number, kind, known, moments=moments) for number, kind in enumerate(wanted, 1)]


def _draw_one(
    drawing: random.Random, number: int, kind: Kind, known: Lengths, *, moments: Sequence[Moment]
) -> Disturbance:
    possible = [moment for moment in moments if _possible(moment, number, known)] or ["step"]
    moment = drawing.choices(possible, [SHARES[name] for name in possible])[0]
    # Drawn in any case, so that what is known shifts no later draw.
    fraction, choice, length, offset = (drawing.random() for _ in range(4))
    anchor: Anchor
    after, lasts = 0.0, SHORT + length * (LONG - SHORT)
    if kind == "fill-disk" and known.saves:
        # A moment before a save, so that it meets a disk that is full; the last one finds it free again.
        left = {step: (known.saves[-1] - step) * known.step for step in known.saves}
        early = [step for step in known.saves if left[step] >= 2 * SHORT] or known.saves[:1]
        saved = early[int(fraction * len(early))]
        lasts = min(lasts, left[saved] / 2) or lasts
        before = saved - 1 - int(FILLING / max(known.step, 1e-3))
        moment, anchor, count = "save", "step", max(1, before)
        if not known.steps >= saved:  # named by something else than steps of the optimizer
            anchor, count = "saving", 1 + known.saves.index(saved)
    elif kind == "corrupt-checkpoint":
        moment, anchor, count = "save", "saved", 2 + int(fraction * max(1, len(known.saves) - 2))
        after = offset * known.step
    elif moment == "start":
        anchor, count, after = "started", 1, fraction * START
    elif moment == "init":
        anchor, count, after = "started", 1, fraction * known.init
    elif moment == "again":
        anchor, count, after = "disturbed", number - 1, fraction * AGAIN
    elif moment == "save":
        anchor, count, after = "saving", 1 + int(fraction * len(known.saves)), offset * known.save
    elif not known.steps:
        anchor, count, after = "seconds", 1, fraction * known.seconds
    elif moment == "last":
        anchor, count, after = "step", max(1, known.steps - 1), fraction * known.step
    else:
        place = fraction * known.steps
        anchor, count, after = "step", max(1, int(place)), (place - int(place)) * known.step
    return Disturbance(
        number=number,
        kind=kind,
        moment=moment,
        anchor=anchor,
        count=count,
        after=after,
        choice=choice,
        lasts=lasts if kind in ("delay", "disconnect", "fill-disk") else 0.0,
    )


def _possible(moment: Moment, number: int, known: Lengths) -> bool:
    if moment == "save":
        return bool(known.saves)
    if moment == "again":
        return number > 1
    if moment in ("init", "last"):
        return known.steps > 1
    return True
