"""The numbers that a script reduces over its workers, compared where the trainings themselves agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hora.verify.causes import METRIC, METRIC_REMOVALS
from hora.verify.compare import Tolerance
from hora.verify.evidence import Pair
from hora.verify.fixes import fix_of
from hora.verify.report import Experiment, Found
from hora.verify.runs import Run

__all__ = ["Judgement", "judge_metrics"]


@dataclass(frozen=True)
class Judgement:
    """What was found about metrics."""

    causes: list[Found] = field(default_factory=list)
    experiments: list[Experiment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Metric:
    """One number: the step before which it was reduced, where, and its values."""

    step: int
    place: str
    one: float
    many: float


def judge_metrics(pair: Pair, rerun: Callable[[str], Run]) -> Judgement:
    """Compare the metrics, and where they differ reduce them in other ways.

    Args:
        pair: two runs that agree.
        rerun: the run with several workers again, under an intervention.
    """
    different = _different(pair.one, pair.many)
    if not different:
        return Judgement()
    first = different[0]
    experiments = []
    for removal in METRIC_REMOVALS:
        run = rerun(removal)
        if not run.ok:
            experiments.append(Experiment.failed([METRIC], [removal], run.why()))
            continue
        left = [metric for metric in _different(pair.one, run) if metric.place == first.place]
        experiments.append(
            Experiment(
                causes=(METRIC.name,),
                title=METRIC.title,
                removals=(removal,),
                agreed=not left,
                text="agree" if not left else f"part: {left[0].many:.6g} instead of {left[0].one:.6g}",
                step=left[0].step if left else None,
            )
        )
        if not left:
            how = (
                "With each worker's value weighted by its number of samples it is the same"
                if removal == "metric-weights"
                else "With all samples evaluated on every worker it is the same, so the model is, and the "
                "shares are what differs: unequal, padded by repeated samples, or cut into other batches"
            )
            why = (
                f"The number reduced at {first.place}, after step {first.step}, is {first.one:.6g} with 1 "
                f"worker and {first.many:.6g} with {pair.many.workers}. {how}."
            )
            found = Found(
                name=METRIC.name, title=METRIC.title, why=why, fix=fix_of("metric", METRIC.fix, pair.one)
            )
            return Judgement([found], experiments)
    note = (
        f"The number reduced at {first.place}, after step {first.step}, is {first.one:.6g} with 1 worker and "
        f"{first.many:.6g} with {pair.many.workers}; the trainings agree, and no known cause explains it."
    )
    return Judgement([], experiments, [note])


def _different(one: Run, many: Run) -> list[_Metric]:
    tolerance = Tolerance.of(one)
    found = []
    for step, (mine, theirs) in enumerate(zip(_metrics(one), _metrics(many), strict=False)):
        for place in mine:
            for value, other in zip(mine[place], theirs.get(place, ()), strict=False):
                others = (other, other / many.workers) if place.endswith("(sum)") else (other,)
                if not any(_close(value, candidate, tolerance.at(step + 1)) for candidate in others):
                    found.append(_Metric(step, place, value, other))
    return found


def _close(one: float, other: float, limit: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) == math.isnan(other)
    return abs(one - other) <= limit * max(abs(one), abs(other), 1e-3)


def _metrics(run: Run) -> list[dict[str, list[float]]]:
    """By step, and after the last: values by place, on rank 0."""
    rank = run.ranks[0]
    rows = [step.metrics for step in rank.steps]
    if rank.ending is not None:
        rows.append(rank.ending.metrics)
    table = []
    for row in rows:
        places: dict[str, list[float]] = {}
        for place, value, _ in row:
            places.setdefault(place, []).append(value)
        table.append(places)
    return table
