"""Rank 0 tells what is wrong with checkpoints: as a verdict, or on stderr where nobody takes verdicts."""

from __future__ import annotations

import sys

from hora.core import commits, notices
from hora.core.commits import Place
from hora.core.errors import RunDirectoryError
from hora.guard.verdict import Verdict
from hora.torch._context import Context

__all__ = ["Teller", "tell_damaged"]


class Teller:
    """Tells of checkpoints that could not be written: once, until one could be.

    Args:
        context: of the job.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._episodes = 0
        self._failing = False

    def failed(self, step: int, reason: str) -> None:
        """A checkpoint could not be written."""
        if not self._failing:
            self._failing = True
            self._episodes += 1
            self._say(
                step,
                f"The checkpoint of step {step} could not be written: {reason}. Training goes on, earlier "
                "checkpoints are as they were, and the next one is tried as usual.",
                f"written {self._episodes}",
            )

    def written(self, step: int) -> None:
        """The checkpoint of this step was committed."""
        self._failing = False
        notices.tell("saved", step=step)

    def left(self, step: int, reason: str) -> None:
        """Old ones could not be removed."""
        text = f"Step {step} is saved, but checkpoints that are not needed any more stay: {reason}."
        self._say(step, text, "removed")

    def _say(self, step: int, text: str, key: str) -> None:
        advice = (
            "Free some space there, or keep fewer: hora.Checkpoints(..., keep=2); the next run can write "
            "elsewhere by --checkpoints DIR."
        )
        _tell(self._context, "checkpoint-failed", step=step, text=text, advice=advice, key=key)


def tell_damaged(context: Context, place: Place, reason: str) -> None:
    """Tell of a checkpoint that is passed over. One that was never completed is no finding."""
    text = f"{place.path.name} in {place.path.parent} is passed over: {reason}."
    if not (place.path / commits.MARKER).exists():
        print(f"hora: {text}", file=sys.stderr, flush=True)
        return
    _tell(
        context,
        "checkpoint-damaged",
        step=place.step,
        text=f"{text} The newest one that is whole is looked for.",
        advice="Look after the disk: what was written was read back differently.",
        key=str(place.path),
    )


def _tell(context: Context, kind: str, *, step: int, text: str, advice: str, key: str) -> None:
    record = {"kind": kind, "step": step, "text": text, "advice": advice, "key": key}
    if context.guard is not None and context.guard.reporter.active:
        context.guard.reporter.send(record)
        return
    verdict = Verdict(kind=kind, text=text, advice=advice, step=step, ranks=[context.world.rank])
    print("hora: " + verdict.paragraph.replace("\n", "\n  "), file=sys.stderr, flush=True)
    if context.run is not None and context.settings.job is None:  # else the supervisor alone writes there
        try:
            context.run.append_verdict(verdict.line())
        except RunDirectoryError as error:
            print(f"hora: a verdict is not written down: {error}", file=sys.stderr, flush=True)
