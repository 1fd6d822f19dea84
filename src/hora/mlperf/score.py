"""The score of several runs, by the rules of MLPerf Training v0.7, and published results to set beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hora.core.errors import DataError, UsageError
from hora.core.plural import plural
from hora.mlperf.result import Result
from hora.plan.collectives import DATA
from hora.plan.published import rows_of

__all__ = ["RUNS", "Score", "published", "score"]

RUNS = {"resnet": 5, "ssd": 5, "maskrcnn": 5, "gnmt": 10, "transformer": 10, "minigo": 10}
"""How many runs make a score: the training rules of June 2020 (v0.7), the same as those submitted to v0.6."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of some runs.

    Attributes:
        seconds: the mean of the runs that count.
        fastest: which was dropped.
        slowest: which was dropped; a run that missed its target is the slowest.
        counted: the others, the fastest first.
    """

    seconds: float
    fastest: Result
    slowest: Result
    counted: tuple[Result, ...]


def score(results: Sequence[Result]) -> Score:
    """The mean time to train, the fastest and the slowest run dropped.

    One run that missed its target may be dropped as the slowest; with two there is no score.

    Args:
        results: as many as the rules want of the benchmark.

    Raises:
        UsageError: too few or too many runs, the same one twice, or runs of several benchmarks.
        DataError: more than one run missed its target.
    """
    names = sorted({result.benchmark for result in results})
    if len(names) != 1:
        raise UsageError(
            f"The runs are of {len(names)} benchmarks: {', '.join(names) or 'none'}.",
            fix="Give runs of one benchmark.",
        )
    places = [result.run.resolve() for result in results]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} is given twice.", fix="Give each run once.")
    name = names[0]
    if name not in RUNS:
        raise DataError(f"{name} is no benchmark of v0.7.", fix=f"Give runs of {', '.join(RUNS)}.")
    wanted = RUNS[name]
    if len(results) != wanted:
        short = wanted - len(results)
        raise UsageError(
            f"A score of {name} takes {wanted} runs; {len(results)} {plural(len(results), 'run')} given.",
            fix=f"Train {short} more, each with another seed: hora train {name} --seed N."
            if short > 0
            else f"Leave out {-short}, chosen before you saw their times.",
        )
    failed = [result for result in results if not result.reached]
    if len(failed) > 1:
        raise DataError(
            f"{len(failed)} runs missed their target: {', '.join(str(one.run) for one in failed)}. "
            "One may be dropped as the slowest; with more there is no score.",
            fix=f"Choose values that reach the target, and train {wanted} runs anew: hora train {name}.",
        )
    ordered = sorted(results, key=lambda one: one.seconds if one.reached else math.inf)
    counted = tuple(ordered[1:-1])
    return Score(
        seconds=math.fsum(one.seconds for one in counted) / len(counted),
        fastest=ordered[0],
        slowest=ordered[-1],
        counted=counted,
    )


def published(benchmark: str) -> list[dict[str, str]]:
    """The rows of MLPerf Training v0.6 of a benchmark, the slowest system first.

    Raises:
        DataError: there are none.
    """
    rows = [row for row in rows_of(DATA / "mlperf_v06_results.csv") if row["benchmark"] == benchmark]
    if not rows:
        raise DataError(
            f"No row of v0.6 is known for {benchmark!r}.", fix=f"Give a run of {', '.join(RUNS)}."
        )
    return sorted(rows, key=lambda row: -float(row["score_minutes"]))
