"""Offsets between the ranks' clocks, from simulated ranks whose true offsets are known."""

from __future__ import annotations

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hora.core.clocks import clocks
from hora.core.events import Event, Recording


def simulate(
    offsets: list[float],
    *,
    steps: int = 50,
    step: float = 0.1,
    drifts: list[float] | None = None,
    seed: int = 0,
    kind: str = "average gradients",
) -> dict[int, Recording]:
    """Ranks that compute for a random time, then all-reduce; each stamps events with a clock of its own.

    Nobody leaves before the last has come and 1 ms has passed; leaving takes up to 0.2 ms more.
    """
    draw = random.Random(seed)
    drifts = drifts or [0.0] * len(offsets)
    recordings = {rank: Recording() for rank in range(len(offsets))}
    now = 1.8e9
    for cycle in range(steps):
        entered = [now + step * draw.uniform(0.2, 1.0) for _ in offsets]
        over = max(entered) + 1e-3
        for rank, recording in recordings.items():
            times = (entered[rank], over + 2e-4 * draw.random())
            start, stop = (time + offsets[rank] + drifts[rank] * (time - 1.8e9) for time in times)
            recording.events.append(Event(kind, "gradients", start, stop, {"cycle": cycle, "bytes": 8}))
        now = over
    return recordings


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.sampled_from(["average gradients", "mean", "barrier"]),
)
def test_the_true_offset_lies_within_the_stated_error(offsets: list[float], seed: int, kind: str) -> None:
    found = clocks(simulate([0.0, *offsets], seed=seed, kind=kind))
    assert found[0].offset == found[0].error == 0.0
    for rank, true in enumerate(offsets, 1):
        # The resolution of a float of 1.8e9 is 2.4e-7.
        assert abs(found[rank].offset - true) <= found[rank].bound + 1e-6
        # Differences of the ends are triangular over plus and minus 0.2 ms: a deviation of 0.082 ms.
        assert abs(found[rank].offset - true) < 6e-5
        assert 2e-5 < found[rank].error < 2e-4
        assert found[rank].bound < 0.02
        assert found[rank].events == 50


def test_equal_clocks() -> None:
    found = clocks(simulate([0.0, 0.0, 0.0]))
    assert all(clock.agrees for clock in found.values())
    assert found[2].common(1.8e9 + 1) == 1.8e9 + 1


def test_ranks_of_one_host_have_one_clock() -> None:
    recordings = simulate([0.0, 0.005, 2.0, 2.0])
    for rank, recording in recordings.items():
        recording.events.insert(0, Event("init", "main", 1.8e9, 1.8e9, {"host": f"lab-{rank // 2}"}))
    recordings[3].events = recordings[3].events[:1]  # knows its host and nothing else
    found = clocks(recordings)
    # What an overloaded host makes of rank 1's ends is no clock's doing.
    assert found[1].shared
    assert found[1].agrees
    assert abs(found[1].offset - 0.005) < 1e-4
    assert found[3] == found[2]
    assert abs(found[3].common(1.8e9 + 2.0) - 1.8e9) < 1e-4


def test_only_the_last_bucket_of_a_backward_tells_the_moment() -> None:
    """An earlier one has come while backward went on, and its end is when the script came to look."""
    recordings = simulate([0.0, 2.0])
    for rank, recording in recordings.items():
        early = [
            event._replace(start=event.start - 0.01, stop=event.stop + 0.02 * rank)
            for event in recording.events
        ]
        recording.events = [one for pair in zip(early, recording.events, strict=True) for one in pair]
    assert abs(clocks(recordings)[1].offset - 2.0) < 1e-4


def test_a_rank_that_always_notices_late_stays_within_the_bound() -> None:
    recordings = simulate([0.0, 0.0])
    slow = recordings[1]
    slow.events = [event._replace(stop=event.stop + 0.03) for event in slow.events]
    clock = clocks(recordings)[1]
    assert abs(clock.offset - 0.0) <= clock.bound


def test_clocks_that_drift_apart() -> None:
    recordings = simulate([0.0, 3.0], drifts=[0.0, 5e-5], steps=1000, step=1.0)
    clock = clocks(recordings)[1]
    assert abs(clock.drift - 5e-5) < 2e-6
    assert clock.error < 2e-4
    for reference, own in zip(recordings[0].events, recordings[1].events, strict=True):
        assert abs(clock.common(own.stop) - reference.stop) < 1e-3


def test_a_gap_in_one_recording_does_not_shift_the_others() -> None:
    """start_timeline lets rank 0 record elsewhere for a while."""
    recordings = simulate([0.0, 2.0])
    del recordings[0].events[10:20]
    assert abs(clocks(recordings)[1].offset - 2.0) < 3e-4


def test_of_two_kinds_the_one_that_knows_better_counts() -> None:
    recordings = simulate([0.0, 2.0])
    others = simulate([0.0, 2.0], kind="mean", seed=1)
    del others[0].events[0]  # so that each is matched with the next
    for recording in others.values():
        recording.events = [event._replace(args={}) for event in recording.events]
    for rank, recording in recordings.items():
        recording.events += others[rank].events
    assert abs(clocks(recordings)[1].offset - 2.0) < 3e-4


def test_ranks_that_share_no_event() -> None:
    recordings = simulate([0.0, 5.0])
    for name, event in (("broadcast", recordings[1].events[0]),):
        recordings[1].events = [event._replace(name=name)]
    clock = clocks(recordings)[1]
    assert clock.error == math.inf
    assert clock.events == 0
    assert clock.agrees
    of_a_set = {"process_set": 1, "bytes": 8}
    recordings[1].events = [event._replace(args=of_a_set) for event in recordings[0].events]
    assert clocks(recordings)[1].events == 0
    assert clocks({}) == {}
    assert clocks({3: recordings[1]})[3].error == 0.0
