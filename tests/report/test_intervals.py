"""Sets of time, held to what they mean point by point."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hora.report._intervals import Interval, length, minus, union

# Whole numbers, so that a set is known by which of the unit steps it holds, and sums are exact.
spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def steps(intervals: list[Interval] | list[tuple[int, int]]) -> set[int]:
    return {at for start, stop in intervals for at in range(int(start), int(stop))}


@given(spans)
def test_a_union_holds_each_moment_once(given_spans: list[tuple[int, int]]) -> None:
    merged = union(given_spans)
    assert steps(merged) == steps(given_spans)
    assert length(merged) == len(steps(given_spans))
    ends = [end for interval in merged for end in interval]
    assert ends == sorted(set(ends))  # sorted, disjoint, not touching, none empty
    assert union(merged) == merged


@given(spans, spans)
def test_a_difference_holds_what_the_other_does_not(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    left = minus(union(first), union(second))
    assert steps(left) == steps(first) - steps(second)
    assert all(start < stop for start, stop in left)
    assert length(left) + length(union(second)) == len(steps(first) | steps(second))
