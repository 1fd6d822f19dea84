"""Trials of bucket sizes, with steps whose times are made up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hora.torch._tuning import COUNTED, FIRST, SETTLING, SIZES, UNTIMED, Tuning


def run(times: dict[float, float], *, slow_first: float = 0.0, ranks: int = 1, layouts: int = 99) -> Tuning:
    """A training whose step takes ``times[size]`` seconds."""
    now = 0.0

    def add_up(values: Sequence[float]) -> list[float]:
        return [ranks * value for value in values]

    tuning = Tuning(None, lambda size: min(SIZES.index(size), layouts - 1), add_up, clock=lambda: now)
    used = []
    while not tuning.done:
        size = tuning.size
        fresh = not used or used[-1] != size
        used.append(size)
        now += times[size] + (slow_first if fresh else 0.0)
        tuning.after_step()
        assert len(used) <= UNTIMED + len(SIZES) * (SETTLING + COUNTED)
    return tuning


@pytest.mark.parametrize("best", SIZES)
def test_the_fastest_size_is_kept(best: float) -> None:
    tuning = run({size: 0.1 if size == best else 0.2 for size in SIZES}, slow_first=5.0)
    assert tuning.size == best
    assert tuning.times == pytest.approx({size: 0.1 if size == best else 0.2 for size in SIZES})


def test_a_gain_within_the_noise_changes_nothing() -> None:
    assert run({size: 0.1 if size == FIRST else 0.099 for size in SIZES}).size == FIRST


def test_times_are_means_over_the_ranks() -> None:
    assert run(dict.fromkeys(SIZES, 0.25), ranks=4).times == pytest.approx(dict.fromkeys(SIZES, 0.25))


def test_sizes_that_make_the_same_buckets_are_tried_once() -> None:
    assert run(dict.fromkeys(SIZES, 0.1), layouts=2).times.keys() == set(SIZES[:2])
    assert Tuning(None, lambda size: 0, list).done


def test_a_given_size_is_kept() -> None:
    tuning = Tuning(7.0, lambda size: size, list)
    assert (tuning.size, tuning.done) == (7.0, True)


def test_outliers_do_not_decide() -> None:
    now, count = 0.0, 0
    tuning = Tuning(None, lambda size: size, list, clock=lambda: now)
    while not tuning.done:
        count += 1
        now += 0.05 if tuning.size == 4.0 else 0.1
        now += 10.0 if count % 5 == 0 else 0.0  # an evaluation
        tuning.after_step()
    assert tuning.size == 4.0
