"""The schedule is a function of the seed, and reaches all moments."""

from __future__ import annotations

import collections

from hora.chaos.schedule import MOMENTS, Lengths, draw

KNOWN = Lengths(seconds=20.0, init=2.0, steps=100, step=0.1, saves=(20, 40, 60, 80, 100), save=0.05)


def test_one_seed_one_schedule() -> None:
    counts = {"kill": 3, "delay": 2, "fill-disk": 1}
    assert draw(7, counts, KNOWN) == draw(7, counts, KNOWN)
    assert draw(7, counts, KNOWN) != draw(8, counts, KNOWN)
    kinds = collections.Counter(one.kind for one in draw(7, counts, KNOWN))
    assert kinds == {"kill": 3, "delay": 2, "fill-disk": 1}


def test_all_moments_are_drawn_and_lie_inside_the_run() -> None:
    drawn = [one for seed in range(100) for one in draw(seed, {"kill": 4}, KNOWN)]
    assert {one.moment for one in drawn} == set(MOMENTS)
    for one in drawn:
        assert 0 <= one.choice < 1
        limit = {"start": 0.3, "init": 2.0, "step": 0.1, "save": 0.05, "last": 0.1, "again": 3.0}[one.moment]
        assert 0 <= one.after <= limit
        if one.moment == "step":
            assert (one.anchor, one.lasts) == ("step", 0.0)
            assert 1 <= one.count <= 99
        elif one.moment == "save":
            assert one.anchor == "saving"
            assert 1 <= one.count <= 5
        elif one.moment == "last":
            assert (one.anchor, one.count) == ("step", 99)
        elif one.moment == "again":
            assert one.count == one.number - 1 >= 1


def test_steps_are_drawn_evenly() -> None:
    drawn = [draw(seed, {"kill": 1}, KNOWN, moments=("step",))[0].count for seed in range(1000)]
    halves = collections.Counter(count > 50 for count in drawn)
    assert 400 < halves[True] < 600  # 500 expected, with a standard deviation of 16


def test_chosen_moments_only() -> None:
    drawn = [one for seed in range(30) for one in draw(seed, {"kill": 2}, KNOWN, moments=("save", "again"))]
    assert {one.moment for one in drawn} == {"save", "again"}


def test_the_disk_is_full_before_a_save_begins() -> None:
    for seed in range(30):
        (one,) = draw(seed, {"fill-disk": 1}, KNOWN)
        assert (one.moment, one.anchor, one.after) == ("save", "step", 0.0)
        # 0.2 s, which are 2 steps of 0.1 s, before the last step ahead of the save
        assert one.count in (17, 37, 57, 77)
        # half the time to the last save, which finds the disk free again
        assert 0.3 <= one.lasts <= min(3.0, 0.05 * (100 - (one.count + 3)))


def test_a_checkpoint_is_damaged_when_there_is_one() -> None:
    for seed in range(30):
        (one,) = draw(seed, {"corrupt-checkpoint": 1}, KNOWN)
        assert one.anchor == "saved"
        assert 2 <= one.count <= 4  # with an older one to go on from, and a rest of the training


def test_a_run_of_which_only_the_length_is_known() -> None:
    drawn = [one for seed in range(60) for one in draw(seed, {"kill": 1}, Lengths(seconds=20.0))]
    assert {one.anchor for one in drawn} == {"started", "seconds"}
    assert all(0 <= one.after < 20 for one in drawn)
    assert max(one.after for one in drawn) > 10
