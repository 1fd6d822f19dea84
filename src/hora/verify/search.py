"""``hora verify``: two runs, a comparison, and the experiments that decide why they part."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hora.core.errors import VerifyError
from hora.core.plural import plural
from hora.launch import Target
from hora.launch.supervisor import TIMED_OUT
from hora.verify.accept import accept
from hora.verify.causes import CAUSES, Cause
from hora.verify.compare import Comparison, compare
from hora.verify.evidence import Pair, unfollowed
from hora.verify.fixes import STEPS, fix_of
from hora.verify.metrics import judge_metrics
from hora.verify.overlap import overlap
from hora.verify.report import Experiment, Found, Report
from hora.verify.runs import Run, Runner, Runs

__all__ = ["Question", "verify"]

MOST = 40
"""Experiments at most; what is not decided by then is not one of the known causes or pairs of them."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be verified.

    Attributes:
        target: the script.
        arguments: its own arguments.
        workers: how many are compared with one.
        steps: of the optimizer, at most.
        folder: the run directory.
        float64: compute in float64 from the start.
        per_worker_batch: accept a global batch that grows with the workers.
        env: variables for the workers.
        timeout: seconds for each run.
        runner: starts a job, when not the launcher.
    """

    target: Target
    arguments: Sequence[str] = ()
    workers: int
    steps: int = 20
    folder: Path
    float64: bool = False
    per_worker_batch: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    runner: Runner | None = None


def verify(question: Question, *, say: Callable[[str], None]) -> Report:
    """Run the script with one worker and with several, compare, and find the cause of a difference.

    Args:
        question: what is to be verified.
        say: told each line of progress.

    Raises:
        VerifyError: the runs cannot be compared.
        LaunchError: the script cannot be started.
    """
    return _Search(question, say).run()


class _Search:
    def __init__(self, question: Question, say: Callable[[str], None]) -> None:
        self._question, self._say = question, say
        self._runs = Runs(
            question.target,
            question.arguments,
            folder=question.folder,
            steps=question.steps,
            env=question.env,
            timeout=question.timeout,
            runner=question.runner,
        )
        self._float64 = question.float64
        self._experiments: list[Experiment] = []
        self._tried: dict[frozenset[tuple[str, str]], tuple[Pair | None, Comparison | None]] = {}

    def run(self) -> Report:
        one, many = self._first()
        compared = compare(one, many)
        shown, rounding = compared, None
        if compared.parting is not None and not self._float64:
            one, many, compared, rounding = self._in_float64(one, many, compared)
        base = Pair(one=one, many=many, step=_index(compared))
        if compared.parting is None:
            found = overlap(base)
            causes = [found] if found is not None else []
            final: tuple[Pair, tuple[tuple[Cause, str], ...]] | None = (base, ())
        else:
            chosen, final = self._search(base, compared)
            causes = [self._found(cause, pair, compared_there) for cause, pair, compared_there in chosen]
        accepted, decided = "", compared
        if self._question.per_worker_batch and compared.parting is not None and final is not None:
            accepted, causes = accept(base, causes)
            decided = compared if causes else chosen[-1][2]
        notes = [unfollowed(base)] if decided.parting is not None and not causes and unfollowed(base) else []
        if final is not None:
            metric = judge_metrics(final[0], lambda removal: self._metric_run(final, removal))
            self._experiments += metric.experiments
            causes += metric.causes
            notes += metric.notes
        self._runs.forget_batches()
        return Report(
            workers=self._question.workers,
            one=one,
            many=many,
            shown=shown,
            compared=decided,
            rounding=rounding,
            accepted=accepted,
            causes=causes,
            experiments=self._experiments,
            notes=notes,
            folder=self._question.folder,
            runs=self._runs.made,
            asked=self._question.steps,
        )

    # --- the first runs -------------------------------------------------------------------------

    def _first(self) -> tuple[Run, Run]:
        workers = self._question.workers
        one = self._timed(1, "1-worker")
        self._check(one)
        many = self._timed(workers, f"{workers}-workers")
        self._check(many)
        return one, many

    def _timed(self, workers: int, label: str) -> Run:
        run = self._runs.run(workers, label, keep=True, float64=self._float64)
        steps = len(run.steps)
        self._say(
            f"  {workers} {plural(workers, 'worker')}: {steps} {plural(steps, 'step')} in "
            f"{run.result.seconds:.1f} s" + (", in float64" if self._float64 else "")
        )
        return run

    def _check(self, run: Run) -> None:
        """Raises VerifyError unless something was recorded."""
        with_ = f"with {run.workers} {plural(run.workers, 'worker')}"
        failure = run.result.failure
        log = run.result.run.log(0 if failure is None else failure.rank)
        if run.result.exit_code:
            if failure is not None:
                self._say(failure.report)
            hint = (
                "Make it run first" if run.workers == 1 else f"With fewer workers it ran; make it run {with_}"
            )
            if run.result.exit_code == TIMED_OUT:
                hint = f"Give it more time by --timeout, or see what it waits for {with_}"
            raise VerifyError(
                f"The script fails {with_}: {run.why().removeprefix('hora: ').rstrip('.')}.",
                fix=f"{hint}: hora run -n {run.workers} ... (its output: {log})",
            )
        endings = [rank.ending for rank in run.ranks]
        module = next((ending.module for ending in endings if ending is not None), "") or "hora.torch"
        if any(ending is not None and ending.why == "no-init" for ending in endings):
            raise VerifyError(
                f"The script trains without {module}.init(), so its workers do not know of each other.",
                fix=f"Write `import {module} as hora` and `hora.init()` at its start.",
            )
        if any(ending is None for ending in endings):
            raise VerifyError(
                f"A worker left no record {with_}: it ended by os._exit(), or trains in a child of its own.",
                fix=f"Train in the script itself, and let it end by itself (its output: {log}).",
            )
        if not run.steps:
            raise VerifyError(
                f"The script made no step of {STEPS[module][0]} {with_}: there is nothing to compare.",
                fix=f"Give the arguments that make it train, by {STEPS[module][1]}.",
            )

    def _in_float64(
        self, one: Run, many: Run, compared: Comparison
    ) -> tuple[Run, Run, Comparison, Comparison | None]:
        """The same two runs in float64, where rounding cannot be mistaken for anything else."""
        self._float64 = True
        label = f"{self._question.workers}-workers"
        wide_one = self._timed(1, "1-worker-float64")
        wide_many = self._timed(self._question.workers, f"{label}-float64") if wide_one.ok else wide_one
        if not (wide_one.ok and wide_many.ok and wide_one.steps and wide_many.steps):
            self._float64 = False
            bad = wide_many if wide_one.ok else wide_one
            self._say(f"  in float64 the script fails ({bad.why()}); experiments in its own dtype")
            return one, many, compared, None
        wide = compare(wide_one, wide_many)
        return wide_one, wide_many, wide, wide

    # --- experiments ----------------------------------------------------------------------------

    def _search(
        self, base: Pair, compared: Comparison
    ) -> tuple[list[tuple[Cause, Pair, Comparison]], tuple[Pair, tuple[tuple[Cause, str], ...]] | None]:
        """The causes found, each with the pair in which it was seen, and the pair that agrees at last."""
        chosen: list[tuple[Cause, Pair, Comparison]] = []
        removed: tuple[tuple[Cause, str], ...] = ()
        pair, now = base, compared
        while now.parting is not None and len(self._experiments) < MOST:
            more = self._remove(pair, now, removed)
            if more is None:
                return chosen, None
            removed, new_pair, now = more
            known = {cause.name for cause, _, _ in chosen}
            chosen += [(cause, pair, now) for cause, _ in removed if cause.name not in known]
            pair = Pair(one=new_pair.one, many=new_pair.many, step=_index(now), base=base)
        return chosen, (pair, removed) if now.parting is None else None

    def _remove(
        self, pair: Pair, compared: Comparison, removed: tuple[tuple[Cause, str], ...]
    ) -> tuple[tuple[tuple[Cause, str], ...], Pair, Comparison] | None:
        """Remove causes, one or few, on top of those removed already, so that the pair goes on together."""
        seen = {cause.name: cause.seen(pair) for cause in CAUSES}
        for cause in CAUSES:
            if not seen[cause.name] and not removed:
                self._experiments.append(Experiment.idle(cause))
        open_causes = [
            cause for cause in CAUSES if seen[cause.name] and cause not in [done for done, _ in removed]
        ]
        visible = [cause for cause in open_causes if cause.visible]
        hidden = [cause for cause in open_causes if not cause.visible]
        sets: list[tuple[Cause, ...]]
        if visible:
            sets = [(cause,) for cause in visible]
            sets += [tuple(visible)] if len(visible) > 1 else []
            sets += [(*visible, cause) for cause in hidden]
        else:
            sets = [(cause,) for cause in hidden]
        sets += [(*visible, *two) for two in itertools.combinations(hidden, 2)]
        for causes in sets:
            for removals in itertools.product(*(cause.removals(pair) for cause in causes)):
                if len(self._experiments) >= MOST:
                    return None
                wanted = (*removed, *zip(causes, removals, strict=True))
                tried = self._try(pair, compared, wanted)
                if tried is not None:
                    return wanted, *tried
        return None

    def _try(
        self, pair: Pair, compared: Comparison, wanted: tuple[tuple[Cause, str], ...]
    ) -> tuple[Pair, Comparison] | None:
        """One experiment; its runs if they go on together beyond where the pair parted."""
        causes = [cause for cause, _ in wanted]
        removals = [removal for _, removal in wanted]
        one, many = self._both(pair, wanted)
        failed = next((run for run in (one, many) if not run.ok or not run.steps), None)
        if failed is not None:
            why = failed.why() if not failed.ok else "no steps"
            self._note(Experiment.failed(causes, removals, why))
            return None
        now = compare(one, many)
        if now.parting is not None and now.parting.what == "end" and "samples" in removals:
            now = dataclasses.replace(
                now, parting=None
            )  # one worker's own loop does not end with the batches
        assert compared.parting is not None
        agreed = now.parting is None or now.parting.step > compared.parting.step
        self._note(Experiment.made(causes, removals, now, agreed=agreed))
        return (Pair(one=one, many=many, step=_index(now), base=pair.first), now) if agreed else None

    def _both(
        self, pair: Pair, wanted: Sequence[tuple[Cause, str]], extra: Mapping[str, Any] | None = None
    ) -> tuple[Run, Run]:
        workers = self._question.workers
        label = "-".join(removal for _, removal in wanted)
        for_one: dict[str, Any] = {}
        for_many: dict[str, Any] = {}
        for cause, _ in wanted:
            one_more, many_more = cause.plan(pair, self._question.folder / "records")
            for_one |= one_more
            for_many |= many_more
        apply = tuple(removal for _, removal in wanted)
        one = self._runs.run(1, f"1-{label}", apply=apply, keep=True, float64=self._float64, **for_one)
        many = self._runs.run(
            workers, f"{workers}-{label}", apply=apply, keep=True, float64=self._float64, **for_many
        )
        return one, many

    def _metric_run(self, final: Any, removal: str) -> Run:
        """The run with several workers again, with its metrics reduced in another way."""
        pair, wanted = final
        for_many: dict[str, Any] = {}
        for cause, _ in wanted:
            for_many |= cause.plan(pair, self._question.folder / "records")[1]
        if removal == "metric-shares":
            for_many["replay"] = pair.one.plan.folder
        apply = (*(name for _, name in wanted), removal)
        workers = self._question.workers
        return self._runs.run(workers, f"{workers}-{removal}", apply=apply, float64=self._float64, **for_many)

    def _note(self, experiment: Experiment) -> None:
        self._experiments.append(experiment)
        self._say(f"  {experiment.line}")

    def _found(self, cause: Cause, pair: Pair, compared: Comparison) -> Found:
        return Found(
            name=cause.name,
            title=cause.title,
            why=cause.why(pair),
            fix=fix_of(cause.name, cause.fix, pair.one),
        )


def _index(compared: Comparison) -> int:
    return compared.parting.step - 1 if compared.parting is not None else compared.steps - 1
