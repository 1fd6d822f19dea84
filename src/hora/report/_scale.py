"""Axes: ranges, nice ticks and number labels; and curves thinned out without losing their extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Axis", "Point", "moving_average", "thin"]

Point = tuple[float, float]
"""x, y; a y that is not finite is a gap in the curve."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Maps values to 0..1 and names the ticks between.

    Attributes:
        low: value at 0.
        high: value at 1.
        ticks: the labelled values, all within the range.
        log: positions are logarithmic.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def around(
        cls,
        values: Sequence[float],
        *,
        zero: bool = False,
        log: bool = False,
        count: int = 5,
        snap: bool = True,
    ) -> Axis:
        """An axis that holds all finite values.

        Args:
            values: numbers in float32's range; those that are not finite are ignored.
            zero: start at zero, for amounts.
            log: logarithmic, if all values are positive and span more than a factor of 30.
            count: about how many ticks.
            snap: end at ticks; else exactly at the smallest and the largest value.
        """
        finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if log and low > 0 and high / low > 30:
            return cls._logarithmic(low, high, count)
        if zero:
            low, high = min(0.0, low), max(0.0, high)
        if high - low <= abs(high) * 1e-9:  # one value, or one and its rounding errors
            pad = abs(high) * 0.1 or 0.5
            low, high = low - pad * (not zero or low < 0), high + pad * (not zero or high > 0 or low == 0)
        step = _nice_step((high - low) / count)
        if snap:
            low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        return cls(low=low, high=high, ticks=tuple(index * step for index in range(first, last + 1)))

    @classmethod
    def _logarithmic(cls, low: float, high: float, count: int) -> Axis:
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        if last - first > 3:
            stride = max(1, math.ceil((last - first) / count))
            steps = [10.0**power for power in range(first, last + stride, stride)]
        else:
            steps = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
        lowest = max(step for step in steps if step <= low * (1 + 1e-9))
        highest = min(step for step in steps if step >= high * (1 - 1e-9))
        ticks = tuple(step for step in steps if lowest <= step <= highest)
        return cls(low=lowest, high=highest, ticks=ticks, log=True)

    def place(self, value: float) -> float:
        """Where ``value`` stands, 0 to 1."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(value) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        """One text per tick, all with the same number of decimals."""
        if self.log:
            return [_power(tick) for tick in self.ticks]
        largest = max(map(abs, self.ticks), default=0.0)
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else largest or 1.0
        if largest >= 1e7 or (largest and step < 1e-4):
            return [f"{tick:.3g}" if tick else "0" for tick in self.ticks]
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        if round(step, decimals) and abs(step - round(step, decimals)) > step * 1e-6:  # steps of 2.5
            decimals += 1
        return [f"{tick + 0.0:,.{decimals}f}" for tick in self.ticks]


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """At most about ``most`` points that draw the same curve: each slice keeps its ends, lowest and highest.

    Gaps (y not finite) stay gaps where a slice has nothing else.
    """
    if len(points) <= most:
        return list(points)
    slices = max(1, most // 4)
    kept: list[Point] = []
    for index in range(slices):
        part = range(index * len(points) // slices, (index + 1) * len(points) // slices)
        finite = [at for at in part if math.isfinite(points[at][1])]
        if finite:
            low = min(finite, key=lambda at: points[at][1])
            high = max(finite, key=lambda at: points[at][1])
            kept += [points[at] for at in sorted({finite[0], low, high, finite[-1]})]
        else:
            kept.append(points[part[0]])
    return kept


def moving_average(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of the finite ones among about ``window`` points around each point; gaps stay gaps."""
    totals, counts = [0.0], [0]
    for _, y in points:
        good = math.isfinite(y)
        totals.append(totals[-1] + (y if good else 0.0))
        counts.append(counts[-1] + good)
    result = []
    for index, (x, y) in enumerate(points):
        # As far to the right as to the left, also at the ends: else the curve would lag or lead.
        reach = min(window // 2, index, len(points) - 1 - index)
        start, stop = index - reach, index + reach + 1
        mean = (totals[stop] - totals[start]) / max(1, counts[stop] - counts[start])
        result.append((x, mean if math.isfinite(y) else math.nan))
    return result


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(nice * power for nice in (1.0, 2.0, 2.5, 5.0, 10.0) if nice * power >= rough * (1 - 1e-9))


def _power(value: float) -> str:
    return f"{value:,.0f}" if 1 <= value < 1e6 else f"{value:.4g}"
