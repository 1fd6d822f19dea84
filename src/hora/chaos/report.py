"""What came of the disturbances: a table, the differences, and ``chaos.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.chaos.acts import Done
from hora.chaos.compare import Compared
from hora.chaos.conduct import Ended
from hora.chaos.history import History
from hora.core.plural import plural
from hora.core.rundir import RunDirectory, replace_text

__all__ = ["Outcome", "Report", "outcomes"]

ABOUT_RANKS = ("rank-failed", "late-rank", "subset-call")
ABOUT_DISK = ("checkpoint-failed", "checkpoint-damaged")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one disturbance, as far as the run directory and the journals tell.

    Attributes:
        done: the disturbance.
        noticed: seconds until the launcher or the guard wrote down that something was wrong; None: never.
        next_step: seconds until the next step that cannot have been under way; None: there was none.
        repeated: steps that were made again.
        verdicts: kinds of the verdicts found.
    """

    done: Done
    noticed: float | None
    next_step: float | None
    repeated: int
    verdicts: tuple[str, ...]

    def told(self) -> dict[str, Any]:
        """For ``chaos.json``."""
        return {
            **self.done.told(),
            "noticed": self.noticed,
            "next_step": self.next_step,
            "repeated": self.repeated,
            "verdicts": list(self.verdicts),
        }


def outcomes(done: Sequence[Done], run: RunDirectory, found: History) -> list[Outcome]:
    """Attribute what was written down to the disturbances: each gets what came before the next one."""
    verdicts = [(float(one["time"]), str(one["kind"])) for one in _lines(run.path / "verdicts.jsonl")]
    noted = [(time, kind) for time, kind in verdicts if kind in ABOUT_RANKS + ABOUT_DISK]
    resets = [float(one["time"]) for one in _lines(run.path / "worlds.jsonl") if one.get("reason")]
    resets += [
        float(one["start"]) + float(one["seconds"])
        for one in run.about().get("attempts", [])
        if one.get("failure")
    ]
    made = []
    in_order = sorted(done, key=lambda one: one.time)
    for one, following in zip(in_order, [*in_order[1:], None], strict=True):
        until = float("inf") if following is None else following.time
        seen = [time for time, _ in noted if one.time <= time < until]
        seen += [time for time in resets if one.time <= time < until]
        kinds = dict.fromkeys(kind for time, kind in noted if one.time <= time < until)
        if one.failed_saves:  # what the full disk had no room for was told on the console
            kinds["checkpoint-failed"] = None
        made.append(
            Outcome(
                done=one,
                noticed=min(seen) - one.time if seen else None,
                next_step=_next_step(one, until, found),
                repeated=sum(count for time, count in found.repeats if one.time <= time < until),
                verdicts=tuple(kinds),
            )
        )
    return made


def _next_step(one: Done, until: float, found: History) -> float | None:
    """A step of a world that began afterwards; where none did, one of the rank itself."""
    began: dict[str, float] = {}
    for step in found.made:
        began[step.world] = min(began.get(step.world, step.time), step.time)
    later = [time for time in began.values() if one.time < time < until]
    if later:
        return min(later) - one.time
    if one.one.kind in ("kill", "stop", "corrupt-checkpoint"):
        return None
    same = sorted(
        step.ended
        for step in found.made
        if step.ended > one.time and (one.pid in step.processes or not one.pid)
    )
    return same[1] - one.time if len(same) > 1 else None  # the first may have been under way


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


@dataclass(kw_only=True)
class Report:
    """The whole of it.

    Attributes:
        seed: of the schedule.
        command: of the job.
        reference: run directory of the undisturbed run.
        folder: of this test.
        ended: how the disturbed run went.
        outcomes: what came of each disturbance.
        steps: that count, and that were made, disturbed and undisturbed.
        compared: what was compared at the end.
        notes: what else there is to say.
    """

    seed: int
    command: Sequence[str]
    reference: RunDirectory
    folder: Path
    ended: Ended
    outcomes: Sequence[Outcome]
    steps: Mapping[str, int]
    compared: Compared
    notes: Sequence[str]

    @property
    def same(self) -> bool:
        """Whether the result is that of the undisturbed run."""
        return not self.compared.differences

    def lines(self) -> list[str]:
        """What the command prints."""
        told = _table(self.outcomes, self.ended.started or 0.0) if self.outcomes else []
        told += self.notes
        if self.same:
            return [*told, f"same as undisturbed: {'; '.join(self.compared.same)}."]
        count = len(self.compared.differences)
        told.append(f"not the same as undisturbed: {count} {plural(count, 'difference')} (seed {self.seed}).")
        return told + [f"  {line}" for line in self.compared.differences]

    def write(self) -> None:
        """Leave ``chaos.json``."""
        record = {
            "seed": self.seed,
            "command": list(self.command),
            "reference": str(self.reference.path),
            "same": self.same,
            "agrees": self.compared.same,
            "differences": self.compared.differences,
            "notes": list(self.notes),
            "exit_code": self.ended.exit_code,
            "seconds": self.ended.seconds,
            "steps": dict(self.steps),
            "disturbances": [one.told() for one in self.outcomes],
            "missed": [one.kind for one in self.ended.missed],
        }
        replace_text(self.folder / "chaos.json", json.dumps(record, indent=2) + "\n")


def _table(rows: Sequence[Outcome], began: float) -> list[str]:
    head = ("at", "step", "what", "noticed", "next step", "repeated", "verdicts")
    cells = [head]
    for row in rows:
        cells.append(
            (
                f"{row.done.time - began:.2f} s",
                str(row.done.step),
                row.done.what,
                _seconds(row.noticed),
                _seconds(row.next_step),
                f"{row.repeated} {plural(row.repeated, 'step')}" if row.repeated else "-",
                ", ".join(row.verdicts) or "-",
            )
        )
    widths = [max(len(line[place]) for line in cells) for place in range(len(head))]
    return [
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
