"""``hora chaos``: an undisturbed run, a disturbed one, and a comparison of their results."""

from __future__ import annotations

import bisect
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hora.chaos import compare
from hora.chaos.conduct import Ended, conduct
from hora.chaos.history import History, history
from hora.chaos.processes import segments
from hora.chaos.report import Outcome, Report, outcomes
from hora.chaos.schedule import MOMENTS, Kind, Lengths, Moment, draw
from hora.chaos.stage import Stage
from hora.core.errors import ChaosError
from hora.core.journal import Entry, copy, read
from hora.core.plural import plural
from hora.core.rundir import RunDirectory

__all__ = ["Question", "survive"]

JOURNALS, LENGTHS = "chaos", "lengths.json"
"""Inside the run directory of each run: the journals of its ranks, and how long what took."""

TAIL = 20
"""Lines of a failed job's output that are shown."""

ROOM = 32 * 2**20
"""Bytes of the small disk besides twice what the undisturbed run has written."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to survive what.

    Attributes:
        command: ``hora run`` or ``hora train`` as the user wrote it, without the first word.
        folder: the run directory of the test.
        seed: of the schedule.
        counts: how many disturbances of each kind.
        moments: those that may be drawn.
        reference: a finished undisturbed run; None: it is made.
        tolerance: largest relative difference of a metric or tensor; 0.0: every bit.
        ignore: metrics that are not compared.
        timeout: seconds of the disturbed run; None: ten times the undisturbed one and two minutes.
        reads_checkpoints: whether the job is started again from its checkpoints.
    """

    command: Sequence[str]
    folder: Path
    seed: int
    counts: Mapping[Kind, int]
    moments: Sequence[Moment] = MOMENTS
    reference: Path | None = None
    tolerance: float = 0.0
    ignore: Collection[str] = field(default_factory=frozenset)
    timeout: float | None = None
    reads_checkpoints: bool = False


def survive(question: Question, *, say: Callable[[str], None]) -> Report:
    """Run a job undisturbed, unless there is such a run already, then disturbed, and compare.

    Args:
        question: what is to survive what.
        say: told each line of progress.

    Raises:
        ChaosError: the undisturbed run fails, or a disturbance is impossible here.
        RunDirectoryError: a run directory is occupied, or is none.
    """
    with tempfile.TemporaryDirectory(prefix="hora-chaos-") as scratch:
        return _Test(question, Path(scratch), say).run()


class _Test:
    def __init__(self, question: Question, scratch: Path, say: Callable[[str], None]) -> None:
        self._question, self._scratch, self._say = question, scratch, say

    def run(self) -> Report:
        question = self._question
        reference = self._made() if question.reference is None else _opened(question.reference)
        plain = history(read(reference.path / JOURNALS), checked=False)
        known = _lengths(reference)
        schedule = draw(question.seed, question.counts, known, moments=question.moments)
        wanted = ", ".join(f"{count} {kind}" for kind, count in question.counts.items() if count)
        self._say(f"hora: disturbed, with seed {question.seed}: {wanted or 'nothing'}")
        before = segments()
        disk = 2 * _size(reference.path) + ROOM if question.counts.get("fill-disk") else 0
        stage = Stage(self._folder("disturbed"), disk=disk, net=bool(question.counts.get("disconnect")))
        journals = self._journals("disturbed")
        timeout = question.timeout
        ended = conduct(
            stage,
            self._command("disturbed"),
            _environment(),
            journals=journals,
            output=question.folder / "disturbed.log",
            timeout=10 * known.seconds + 120 if timeout is None else timeout,
            schedule=schedule,
            progress=_Progress(plain),
            say=self._say,
        )
        left = compare.left_behind(
            str(journals),
            question.folder / "disturbed",
            folder=stage.folder,
            pids=ended.pids,
            before=before,
        )
        stage.close()
        copy(journals, question.folder / "disturbed" / JOURNALS)
        return self._judged(reference, plain, ended, left)

    # --- the undisturbed run --------------------------------------------------------------------

    def _made(self) -> RunDirectory:
        journals = self._journals("reference")
        output = self._question.folder / "reference.log"
        stage = Stage(self._folder("reference"))
        ended = conduct(
            stage,
            self._command("reference"),
            _environment(),
            journals=journals,
            output=output,
            timeout=None,
        )
        if ended.exit_code != 0:
            raise ChaosError(
                f"The job fails undisturbed, with exit code {ended.exit_code}.",
                fix=f"Make it run first; its output is in {output}.",
            )
        run = RunDirectory.open(self._question.folder / "reference")
        copy(journals, run.path / JOURNALS)
        steps = history(read(journals), checked=False).steps
        lengths = _measure(ended, [step.time for step in steps])
        (run.path / JOURNALS / LENGTHS).write_text(json.dumps(asdict(lengths)) + "\n")
        made = f"{len(steps)} {plural(len(steps), 'step')}, " if steps else ""
        saves = f"{len(lengths.saves)} {plural(len(lengths.saves), 'checkpoint')}, " if lengths.saves else ""
        self._say(f"hora: undisturbed: {made}{saves}{lengths.seconds:.1f} s")
        return run

    # --- the comparison -------------------------------------------------------------------------

    def _judged(
        self, reference: RunDirectory, plain: History, ended: Ended, left: compare.Compared
    ) -> Report:
        question = self._question
        compared, notes = compare.Compared(), []
        output = question.folder / "disturbed.log"
        if ended.exit_code != 0:
            how = (
                "did not end in time"
                if ended.exit_code is None
                else f"failed with exit code {ended.exit_code}"
            )
            compared.differences.append(f"the job {how}; its output is in {output}")
            notes += ["  | " + line for line in output.read_text(errors="replace").splitlines()[-TAIL:]]
        run = RunDirectory.open(question.folder / "disturbed")
        found = history(read(run.path / JOURNALS), checked=plain.checked)
        came = outcomes(ended.done, run, found)
        if ended.exit_code == 0:
            compared.add(
                compare.metrics(reference, run, tolerance=question.tolerance, ignore=question.ignore)
            )
            compared.add(compare.samples(plain, found, tolerance=question.tolerance))
            compared.add(compare.checkpoints(reference, run, tolerance=question.tolerance))
        compared.add(left)
        for outcome in came:
            compared.differences += outcome.done.wrong + self._unnoticed(outcome)
        if ended.missed:
            many = len(ended.missed)
            kinds = ", ".join(f"{one.kind} {one.when}" for one in ended.missed)
            notes.append(
                f"{many} {plural(many, 'disturbance')} did not take place, as the run was over: {kinds}"
            )
            if not ended.done:
                compared.differences.append("nothing was disturbed, so that nothing is shown")
        return Report(
            seed=question.seed,
            command=["hora", *question.command],
            reference=reference,
            folder=question.folder,
            ended=ended,
            outcomes=came,
            steps={
                "undisturbed": len(plain.steps),
                "counting": len(found.steps),
                "made": len(found.made),
            },
            compared=compared,
            notes=notes,
        )

    def _unnoticed(self, outcome: Outcome) -> list[str]:
        """What should have been told to the user and was not, or more than once."""
        one, kinds = outcome.done.one, outcome.verdicts
        if one.kind == "corrupt-checkpoint" and self._question.reads_checkpoints:
            if "checkpoint-damaged" not in kinds:
                return ["no verdict told that a checkpoint was damaged"]
        elif one.kind == "fill-disk" and one.moment == "save" and outcome.done.failed_saves != 1:
            told = outcome.done.failed_saves
            return [
                f"{told} {plural(told, 'verdict')} told that a checkpoint could not be written; 1 is right"
            ]
        return []

    # --- where ----------------------------------------------------------------------------------

    def _command(self, name: str) -> list[str]:
        words = list(self._question.command)
        place = 2 if words[0] == "train" else 1  # behind the name of a workload
        words[place:place] = ["--run-dir", str(self._question.folder / name)]
        return [sys.executable, "-m", "hora", *words]

    def _folder(self, name: str) -> Path:
        folder = self._question.folder / name
        folder.mkdir()
        return folder

    def _journals(self, name: str) -> Path:
        # Not in the run directory: its path may be too long for a socket, and its disk is filled.
        folder = self._scratch / name
        folder.mkdir()
        return folder


class _Progress:
    """How many steps of the training a rank has made that has written an entry."""

    def __init__(self, plain: History) -> None:
        self._places = [step.first or (0, 0) for step in plain.steps]
        self._known = bool(plain.steps) and all(step.first is not None for step in plain.steps)
        self._after = {step.after: count for count, step in enumerate(plain.steps, 1)}

    def __call__(self, entry: Entry) -> int:
        if self._known and entry.spans:
            return bisect.bisect_right(self._places, min(span[:2] for span in entry.spans))
        return self._after.get(entry.after, entry.number)


def _environment() -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if key != "HORA_RUN_DIR"}
    return environ | {"HORA_PRELOAD": "hora.chaos.preload"}


def _opened(path: Path) -> RunDirectory:
    """The undisturbed run in a directory that the user named."""
    inside = path / "reference"
    run = RunDirectory.open(inside if (inside / "run.json").exists() else path)
    code = run.about().get("exit_code")
    if code != 0:
        raise ChaosError(
            f"The run in {run.path} is no reference: it ended with exit code {code}.",
            fix="Give a run that has reached its end, or leave out --reference.",
        )
    return run


def _lengths(run: RunDirectory) -> Lengths:
    path = run.path / JOURNALS / LENGTHS
    if not path.exists():
        return Lengths(seconds=float(run.about().get("seconds", 0.0)))
    told = json.loads(path.read_text())
    return Lengths(**{**told, "saves": tuple(told["saves"])})


def _measure(ended: Ended, steps: Sequence[float]) -> Lengths:
    committed = sorted((end, step, end - begin) for step, begin, end in ended.saves if end is not None)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    return Lengths(
        seconds=ended.seconds,
        init=steps[0] - ended.started if steps and ended.started is not None else 0.0,
        steps=len(steps),
        step=statistics.median(gaps) if gaps else 0.0,
        saves=tuple(step for _, step, _ in committed),
        save=statistics.median(length for _, _, length in committed) if committed else 0.0,
    )


def _size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*"))
