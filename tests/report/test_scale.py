"""Axes and thinned curves."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.report._scale import Axis, moving_average, thin

finite = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False, width=32)


@pytest.mark.parametrize(
    ("values", "ticks", "labels"),
    [
        ([0.0, 8.0], (0, 2, 4, 6, 8), ["0", "2", "4", "6", "8"]),
        ([0.66, 0.88], (0.65, 0.7, 0.75, 0.8, 0.85, 0.9), ["0.65", "0.70", "0.75", "0.80", "0.85", "0.90"]),
        ([0.0, 10.0, math.nan], (0, 2, 4, 6, 8, 10), ["0", "2", "4", "6", "8", "10"]),
        (
            [0.0, 12000.0],
            (0, 2500, 5000, 7500, 10000, 12500),
            ["0", "2,500", "5,000", "7,500", "10,000", "12,500"],
        ),
        ([-1.0, 1.0], (-1, -0.5, 0, 0.5, 1), ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_nice_ticks(values: list[float], ticks: tuple[float, ...], labels: list[str]) -> None:
    axis = Axis.around(values)
    assert axis.ticks == pytest.approx(ticks)
    assert axis.labels() == labels


def test_logarithmic_axis_only_where_it_helps() -> None:
    axis = Axis.around([0.02, 700.0], log=True)
    assert axis.log
    assert axis.labels() == ["0.01", "0.1", "1", "10", "100", "1,000"]
    # From 10^-2 to 10^3 are five decades; 10^0.5 lies in the middle.
    assert axis.place(10**0.5) == pytest.approx(0.5)
    assert Axis.around([0.41, 27.0], log=True).labels() == ["0.2", "0.5", "1", "2", "5", "10", "20", "50"]
    assert Axis.around([1e-9, 1e9], log=True).labels() == ["1e-09", "1e-05", "0.1", "1,000", "1e+07", "1e+11"]
    assert not Axis.around([1.0, 20.0], log=True).log
    assert not Axis.around([0.0, 1e6], log=True).log


@settings(deadline=None)
@given(st.lists(finite, max_size=20), st.booleans(), st.booleans(), st.booleans())
def test_an_axis_holds_its_values(values: list[float], zero: bool, log: bool, snap: bool) -> None:
    axis = Axis.around(values, zero=zero, log=log, snap=snap)
    assert 0 <= len(axis.ticks) <= 12
    assert len(axis.labels()) == len(axis.ticks)
    for value in (*values, *axis.ticks):
        assert -1e-6 <= axis.place(value) <= 1 + 1e-6


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-300, 1e12, math.nan, math.inf])
def test_one_value_has_an_axis_too(value: float) -> None:
    for zero, log in itertools.product((False, True), repeat=2):
        axis = Axis.around([value], zero=zero, log=log)
        assert axis.low < axis.high


@settings(deadline=None)
@given(st.lists(st.one_of(finite, st.just(math.nan)), min_size=1, max_size=2000))
def test_thinning_keeps_extremes_and_ends(values: list[float]) -> None:
    points = list(zip(map(float, range(len(values))), values, strict=True))
    kept = thin(points, 100)
    assert len(kept) <= 100
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    good = [y for y in values if math.isfinite(y)]
    left = [y for _, y in kept if math.isfinite(y)]
    assert bool(good) == bool(left)
    if good:
        assert (min(left), max(left)) == (min(good), max(good))
        assert (left[0], left[-1]) == (good[0], good[-1])


def test_one_spike_among_a_hundred_thousand_survives() -> None:
    points = [(float(index), 0.0) for index in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    assert (77_777.0, 9.0) in thin(points, 800)


def test_moving_average_is_centered_and_leaves_gaps() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, math.nan), (3.0, 4.0), (4.0, 8.0)]
    average = moving_average(points, 3)
    assert average[0] == (0.0, 1.0)  # at the ends the window shrinks to the point itself
    assert average[1] == (1.0, 1.5)  # of 1 and 2; the gap does not count
    assert math.isnan(average[2][1])
    assert average[3] == (3.0, 6.0)  # of 4 and 8
    assert average[4] == (4.0, 8.0)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 20))
def test_moving_average_keeps_a_straight_line(count: int, window: int) -> None:
    points = [(float(index), 3.0 * index) for index in range(count)]
    for (_, y), (_, mean) in zip(points, moving_average(points, window), strict=True):
        assert mean == pytest.approx(y)
