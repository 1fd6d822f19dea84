"""What ``hora verify`` found, as lines for the console and as ``verify.json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hora.core.plural import plural
from hora.core.rundir import replace_text
from hora.verify.compare import Comparison, Parting
from hora.verify.runs import Run

if TYPE_CHECKING:
    from hora.verify.causes import Cause

__all__ = ["Experiment", "Found", "Report"]

_HOW = {
    "summed": "divided by the size",
    "once-averaged": "times the size",
    "averaging": "averaged before step()",
    "unclipped": "gradients as backward() made them",
    "metric-weights": "weighted by samples",
    "metric-shares": "all samples on every worker",
}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One possible cause, or several, removed from both runs.

    Attributes:
        causes: their slugs.
        title: what was removed, in words.
        removals: the interventions.
        agreed: whether the runs then went on together at the step where they had parted; None when it could
            not be tried, or had nothing to remove.
        text: the outcome in words.
        step: where they parted then, if they did.
        largest: relative difference up to there.
    """

    causes: tuple[str, ...]
    title: str
    removals: tuple[str, ...]
    agreed: bool | None
    text: str
    step: int | None = None
    largest: float | None = None

    @property
    def line(self) -> str:
        """As shown on the console."""
        return f"{self.title:<58} {self.text}"

    @classmethod
    def idle(cls, cause: Cause) -> Experiment:
        """Nothing in the records speaks for this cause, and removing it would change nothing."""
        return cls(
            causes=(cause.name,), title=cause.title, removals=(), agreed=None, text="nothing to remove"
        )

    @classmethod
    def failed(cls, causes: Sequence[Cause], removals: Sequence[str], why: str) -> Experiment:
        """The runs did not come to an end."""
        return cls(
            causes=tuple(cause.name for cause in causes),
            title=_title(causes, removals),
            removals=tuple(removals),
            agreed=None,
            text=f"could not be tried: {why}",
        )

    @classmethod
    def made(
        cls, causes: Sequence[Cause], removals: Sequence[str], now: Comparison, *, agreed: bool
    ) -> Experiment:
        """The runs were compared."""
        if now.parting is None:
            text = f"agree: {now.steps} {plural(now.steps, 'step')}, {now.largest:.0e}"
        else:
            word = "agree there, part" if agreed else "part"
            text = f"{word} at step {now.parting.step}"
            if now.parting.name:
                text += f", {now.parting.what} {now.parting.name}, {now.parting.relative:.0e}"
        return cls(
            causes=tuple(cause.name for cause in causes),
            title=_title(causes, removals),
            removals=tuple(removals),
            agreed=agreed,
            text=text,
            step=None if now.parting is None else now.parting.step,
            largest=now.largest,
        )


def _title(causes: Sequence[Cause], removals: Sequence[str]) -> str:
    parts = []
    for cause, removal in zip(causes, removals, strict=True):
        parts.append(f"{cause.title} ({_HOW[removal]})" if removal in _HOW else cause.title)
    return " + ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A cause that an experiment has shown."""

    name: str
    title: str
    why: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answer.

    Attributes:
        workers: how many were compared with one.
        one: the last plain run with one worker.
        many: and with several.
        shown: their comparison in the script's own dtype.
        compared: the comparison that decides; in float64 where the first one found a difference.
        accepted: a difference of N workers from one that was asked to be accepted, in words.
        rounding: the comparison in float64, if it was made beside that of the script's own dtype.
        causes: found; empty when the runs agree, or when none of the known ones explains it.
        experiments: in the order in which they were made.
        notes: more to tell.
        folder: the run directory.
        runs: all runs that were made.
        asked: steps that were asked for.
    """

    workers: int
    one: Run
    many: Run
    shown: Comparison
    compared: Comparison
    rounding: Comparison | None
    causes: Sequence[Found]
    experiments: Sequence[Experiment]
    notes: Sequence[str]
    folder: Path
    runs: Sequence[Run]
    asked: int
    accepted: str = ""

    @property
    def equal(self) -> bool:
        """Whether N workers are one worker."""
        return self.compared.parting is None and not self.causes

    @property
    def headline(self) -> str:
        """The answer in one line."""
        if self.compared.parting is not None:
            return self._parted(self.compared.parting)
        steps = self.compared.steps
        counted = f"{steps} {plural(steps, 'step')}"
        if self.causes:
            return f"{self.workers} workers and 1 worker train the same model for {counted}, but:"
        largest, tolerance = self.compared.largest, self.compared.tolerance
        one = f"1 worker {self.accepted}".rstrip()
        text = f"{self.workers} workers = {one}: {counted}, largest relative difference {largest:.0e}"
        if self.accepted:
            return f"{text} in {tolerance.dtype}"
        if self.rounding is not None:
            return (
                f"{text} in float64; {self.shown.largest:.0e} in {self.shown.tolerance.dtype} is rounding, "
                "which this training amplifies"
            )
        return (
            f"{text} (tolerance in {tolerance.dtype}: {tolerance.at(1):.0e} at step 1, "
            f"{tolerance.at(steps):.0e} at step {steps})"
        )

    def _parted(self, parting: Parting) -> str:
        start = f"{self.workers} workers part from 1 worker at step {parting.step}"
        if parting.what == "end":
            return f"{start}: the runs make {parting.one:g} and {parting.many:g} steps"
        if parting.what == "learning rate":
            return f"{start}, in the learning rate: {parting.one:g} and {parting.many:g}"
        of = "" if parting.what == "parameter" else f"the {parting.what} of "
        return (
            f"{start}, first in {of}{parting.name}: relative difference {parting.relative:.1e}, tolerance "
            f"{parting.tolerance:.1e} in {self.compared.tolerance.dtype}"
        )

    def lines(self) -> list[str]:
        """The answer as shown on the console, below the progress."""
        lines = [self.headline + ("." if not self.headline.endswith(":") else "")]
        for found in self.causes:
            lines += [f"cause: {found.title}. {found.why}", f"  {found.fix}"]
        if self.compared.parting is not None and not self.causes:
            lines.append(
                "cause: none of the known causes alone, and no pair of them that the records speak for."
            )
        elif self.compared.parting is not None and len(self.causes) > 1:
            lines.append(f"Only without all {len(self.causes)} the runs agree.")
        if self.accepted and self.causes:
            lines.append(f"accepted: 1 worker {self.accepted}.")
        lines += [f"note: {note}" for note in (*self.notes, *self._endings())]
        return lines

    def _endings(self) -> list[str]:
        notes = []
        endings = [rank.ending for rank in self.one.ranks if rank.ending is not None]
        if any(ending.why == "stopped" for ending in endings):
            notes.append(
                f"The script was stopped after {len(self.one.steps)} steps (--steps): what comes later in "
                "it, an evaluation at the end say, was not run."
            )
        made = min(len(self.one.steps), len(self.many.steps))
        if self.compared.parting is None and self.compared.steps < made:
            first = self.compared.steps + 1
            notes.append(
                f"Gradients or parameters are not finite from step {first} on, with any number of workers."
            )
        if any(ending.unsaved for ending in endings):
            saves = next(ending.saves for ending in endings)
            notes.append(f"Its calls of {saves} were left out, so that no checkpoint is overwritten.")
        return notes

    def write(self) -> Path:
        """Write ``verify.json``."""
        path = self.folder / "verify.json"
        replace_text(path, json.dumps(self.as_json(), indent=2, default=str) + "\n")
        return path

    def as_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "equal": self.equal,
            "text": self.headline,
            "accepted": self.accepted,
            "workers": self.workers,
            "steps": self.compared.steps,
            "dtype": self.shown.tolerance.dtype,
            "largest": self.compared.largest,
            "tolerance": {
                "dtype": self.compared.tolerance.dtype,
                "per_step": self.compared.tolerance.per_step,
            },
            "parting": None if self.compared.parting is None else asdict(self.compared.parting),
            "own_dtype": None if self.rounding is None else asdict(self.shown),
            "causes": [asdict(found) for found in self.causes],
            "experiments": [asdict(experiment) for experiment in self.experiments],
            "notes": [*self.notes, *self._endings()],
            "runs": [
                {
                    "workers": run.workers,
                    "apply": run.plan.apply,
                    "float64": run.plan.float64,
                    "exit_code": run.result.exit_code,
                    "seconds": round(run.result.seconds, 3),
                    "run": str(run.result.run.path),
                    "records": str(run.plan.folder),
                }
                for run in self.runs
            ],
        }
