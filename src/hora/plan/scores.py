"""Published figures beside predicted ones: errors by family, and the order of configurations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hora.plan.text import table

__all__ = ["LEGEND", "Score", "families", "summary", "validation_lines"]

LEGEND = """
median, 90th, mean: of |predicted / published - 1|; bias: of the same with its sign; in 80 %: rows whose
stated interval holds the published figure. constant, linear: mean error of two trivial planners, the mean
TFLOP/s per GPU of the single-node rows, and linear scaling from the nearest one. order: rank correlation of
figures per GPU within each model, of hora / constant / linear. Constants are fitted to single-node rows only;
each of these is scored without itself. Rows of several servers take part in no fit."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One published figure and what was predicted for it.

    Attributes:
        family: rows of one kind, judged together.
        single: of one server (or a figure that is no time).
        half: of the 80 % interval, as a logarithm.
        constant: the same figure by the mean TFLOP/s per GPU of single-node rows; 0 where it says nothing.
        linear: the same by linear scaling from one server.
        group: rows whose order a planner must get right.
        per_gpu: whether the figures are compared in order after division by the GPUs.
    """

    family: str
    source: str
    what: str
    unit: str
    predicted: float
    published: float
    half: float
    single: bool
    gpus: int = 1
    constant: float = 0.0
    linear: float = 0.0
    group: str = ""

    @property
    def error(self) -> float:
        """Relative: predicted over published, less one."""
        return self.predicted / self.published - 1

    @property
    def covered(self) -> bool:
        """Whether the published figure lies in the stated interval."""
        return abs(math.log(self.predicted / self.published)) <= self.half


def summary(scores: Sequence[Score]) -> dict[str, float]:
    """Errors of some rows: how many, median, 90th percentile, mean, bias, coverage; the baselines' means."""
    errors = sorted(abs(score.error) for score in scores)
    found = {
        "rows": float(len(scores)),
        "median": statistics.median(errors),
        "p90": _quantile(errors, 0.9),
        "mean": statistics.fmean(errors),
        "bias": statistics.fmean(score.error for score in scores),
        "covered": statistics.fmean(score.covered for score in scores),
    }
    beside = [score for score in scores if score.linear]
    if beside:
        found["constant"] = statistics.fmean(abs(s.constant / s.published - 1) for s in beside)
        found["linear"] = statistics.fmean(abs(s.linear / s.published - 1) for s in beside)
        for name, by in (("order", "predicted"), ("order_constant", "constant"), ("order_linear", "linear")):
            order = _order(beside, by)
            if order is not None:
                found[name] = order
    return found


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two values that lie around it."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _order(scores: Sequence[Score], by: str) -> float | None:
    """Spearman's rank correlation of figures per GPU inside each group of three or more, weighted by rows."""
    groups: dict[str, list[Score]] = {}
    for score in scores:
        groups.setdefault(score.group, []).append(score)
    total = weight = 0.0
    for rows in groups.values():
        published = _ranks([row.published / row.gpus for row in rows])
        if len(rows) < 3 or len(set(published)) < 2:
            continue
        found = _ranks([getattr(row, by) / row.gpus for row in rows])
        if len(set(found)) > 1:
            total += len(rows) * statistics.correlation(found, published)
        weight += len(rows)
    return total / weight if weight else None


def _ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def families(scores: Sequence[Score]) -> dict[str, list[Score]]:
    """By what they are, in the order in which they come."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.family, []).append(score)
    return found


def validation_lines(scores: Sequence[Score], *, rows: bool = False) -> list[str]:
    """Errors by family, then of all rows of several servers beside the bars; with ``rows`` every row."""
    out: list[str] = []
    if rows:
        cells = [["row", "what", "predicted", "published", "unit", "error", "in 80 %"]]
        for score in scores:
            figures = [
                f"{score.predicted:,.4g}",
                f"{score.published:,.4g}",
                score.unit,
                f"{score.error:+.1%}",
            ]
            cells.append([score.source, score.what, *figures, "yes" if score.covered else "no"])
        out += [*table(cells), ""]
    head = ["family", "rows", "median", "90th", "mean", "bias", "in 80 %", "constant", "linear", "order"]
    cells = [head]
    of_several = [score for score in scores if not score.single]
    timed = [score for score in scores if score.linear]
    kinds = list(families(scores).items())
    kinds += [("several servers, all", of_several)] if of_several else []
    kinds += [("all rows with baselines", timed)] if timed else []
    kinds += [("all rows", list(scores))] if scores else []
    for name, some in kinds:
        found = summary(some)
        cells.append(
            [
                name,
                f"{found['rows']:.0f}",
                *(f"{found[key]:.1%}" for key in ("median", "p90", "mean")),
                f"{found['bias']:+.1%}",
                f"{found['covered']:.0%}",
                *(f"{found[key]:.1%}" if key in found else "-" for key in ("constant", "linear")),
                f"{found['order']:.2f} / {found['order_constant']:.2f} / {found['order_linear']:.2f}"
                if "order" in found
                else "-",
            ]
        )
    return [*out, *table(cells)]
