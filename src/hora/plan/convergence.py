"""How many epochs a training needs at a global batch: ``E(B) = E_min (1 + B / B_crit)``.

The form follows from the gradient noise scale (McCandlish et al., arXiv:1812.06162): beyond the critical
batch a larger one buys less. Both constants are fitted to MLPerf's reference convergence points
(``data/mlperf_rcps.csv``); a benchmark without any keeps the epochs of its published single-node runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

from hora.plan.collectives import DATA
from hora.plan.published import Row, number, rows_of

__all__ = ["Curve", "Point", "curve", "fit", "leave_one_out", "points"]

SPREAD = 0.03
"""Relative spread that is added to a point's own: the same batch differs so much between rule versions."""


BEYOND = 7.0
"""Critical batch over that of one server where no reference points exist: the geometric mean of that ratio
for ResNet-50, SSD and Mask R-CNN in MLPerf v0.6 (15, 3 and 8)."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Mean epochs (samples, for language models) of reference runs at one batch."""

    batch: float
    epochs: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """``E(B)`` of one benchmark; ``low`` and ``high`` bound the batches that it was fitted to."""

    least: float
    critical: float
    low: float
    high: float
    error: float

    def epochs(self, batch: float) -> float:
        """At a global batch, in samples."""
        return self.least * (1 + batch / self.critical)

    def half_width(self, batch: float) -> float:
        """Relative half of the 80 % interval; wider beyond the fitted batches."""
        beyond = max(0.0, math.log(batch / self.high) if batch > 0 else 0.0)
        return 1.28 * max(self.error, SPREAD) + 0.1 * beyond


def _name(row: Row) -> str:
    """SSD means SSD-ResNet34 up to rules 1.1, RetinaNet from 2.0 on; 3D U-Net counts samples since 3.1."""
    benchmark, version = row["benchmark"], number(row["version"]) or 0.0
    if benchmark == "ssd" and version >= 2:
        return "retinanet"
    if benchmark == "unet3d" and (number(row["epochs_mean"]) or 0) > 100_000:
        return "unet3d-samples"
    return benchmark


def points(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Reference points by benchmark; those whose runs differ by more than their mean are left out."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        batch, mean, spread = (number(row[key]) for key in ("batch_size", "epochs_mean", "epochs_std"))
        if batch and mean and (spread or 0.0) < mean:
            point = Point(batch=batch, epochs=mean, spread=(spread or 0.0) / mean)
            found.setdefault(_name(row), []).append(point)
    return found


def fit(group: Sequence[Point]) -> Curve:
    """Weighted least squares of relative errors; a single batch gives a flat curve."""
    low, high = min(point.batch for point in group), max(point.batch for point in group)
    if high < 1.5 * low:
        mean = sum(point.epochs for point in group) / len(group)
        return Curve(least=mean, critical=math.inf, low=low, high=high, error=0.1)
    best: Curve | None = None
    score = math.inf
    for step in range(400):
        critical = low * 0.2 * (50 * high / low) ** (step / 399)
        weights = [1 / (point.spread**2 + SPREAD**2) for point in group]
        shapes = [(1 + point.batch / critical) / point.epochs for point in group]
        pairs = list(zip(weights, shapes, strict=True))
        least = sum(w * x for w, x in pairs) / sum(w * x * x for w, x in pairs)
        errors = [least * shape - 1 for shape in shapes]
        total = sum(w * e * e for w, e in zip(weights, errors, strict=True))
        if total < score:
            score = total
            root = math.sqrt(
                sum(error**2 for error in errors) / max(1, len(errors) - 2) * (1 + 2 / len(errors))
            )
            best = Curve(least=least, critical=critical, low=low, high=high, error=root)
    assert best is not None
    return best


@cache
def _reference(benchmark: str) -> Curve | None:
    group = points(rows_of(DATA / "mlperf_rcps.csv")).get(benchmark)
    return None if group is None else fit(group)


@cache
def _first_round() -> dict[str, list[tuple[float, float]]]:
    """Batch and epochs of MLPerf v0.6's single-node runs."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows_of(DATA / "mlperf_v06_results.csv"):
        batch, epochs = number(row["global_batch"]), number(row["converge_epoch_median"])
        if row["nodes"] == "1" and batch and epochs:
            found.setdefault(row["benchmark"], []).append((batch, epochs))
    return found


def curve(benchmark: str, *, first_round: bool = False) -> Curve | None:
    """``E(B)`` of a benchmark; ``None`` where nothing is published.

    Args:
        benchmark: ``resnet``, ``ssd``, ``maskrcnn``, ``bert``, ...
        first_round: with the recipes of 2019, as the single-node runs of MLPerf v0.6 needed them.
    """
    found = _reference(benchmark)
    rows = _first_round().get(benchmark, [])
    if rows and (first_round or found is None):
        epochs = sorted(value for _, value in rows)[len(rows) // 2]
        if found is None:
            most = max(batch for batch, _ in rows)
            critical = BEYOND * most
            least = epochs / (1 + most / critical)
            return Curve(least=least, critical=critical, low=most / 2, high=most, error=0.1)
        batch = sorted(value for value, _ in rows)[len(rows) // 2]
        return _FirstRound(**asdict(found), single=epochs, more=max(0.0, epochs - found.epochs(batch)))
    return found


@dataclass(frozen=True, kw_only=True)
class _FirstRound(Curve):
    """The recipes of 2019, which needed ``more`` epochs than today's at the batch of one server.

    Whether a larger batch needs those on top of today's, or hides them, single-node runs cannot tell: the
    geometric mean of both, and an interval that holds both.
    """

    single: float
    more: float

    def _bounds(self, batch: float) -> tuple[float, float]:
        today = super().epochs(batch)
        return max(self.single, today), max(self.single, today + self.more)

    def epochs(self, batch: float) -> float:
        return math.sqrt(math.prod(self._bounds(batch)))

    def half_width(self, batch: float) -> float:
        low, high = self._bounds(batch)
        return math.hypot(super().half_width(batch), 0.5 * math.log(high / low))


def leave_one_out(group: Sequence[Point]) -> list[float]:
    """Relative error at each point of the curve that is fitted to the others."""
    return [
        fit([other for other in group if other is not point]).epochs(point.batch) / point.epochs - 1
        for point in group
        if len(group) > 2
    ]
