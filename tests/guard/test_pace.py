"""Who is slow by itself?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.guard.stage import Stage

from hora.guard.board import Phase
from hora.guard.pace import Pace
from hora.guard.verdict import Verdict

EVEN, SLOW = [0.2, 0.2], [0.2, 0.5]
"""Seconds per step of two ranks' own; ten such steps fill a window, of 2 and of 5 seconds."""


class Training:
    """Ranks that wait for the slowest of them at each step, as an all-reduce makes them do."""

    def __init__(self, size: int = 2) -> None:
        self.stage = Stage(size)
        self.pace = Pace(self.stage.judge)
        self.step, self.now = 1, 0.0
        self.waited, self.loaded = [0.0] * size, [0.0] * size
        for slot in self.stage.slots:
            slot.phase(Phase.RUNNING, 0, 0, 0.0)
            slot.pace(1, 0.0, 0.0, 0.0)
        self.pace.tick(0.0)

    def go(
        self,
        own: Sequence[float],
        *,
        steps: int = 10,
        data: Sequence[float] = (0.0, 0.0),
        network: float = 0.0,
    ) -> Training:
        """So many steps, of so many seconds of each rank's own, of them for data; then the judge looks."""
        self.step += steps
        self.now += steps * (max(own) + network)
        for rank, slot in enumerate(self.stage.slots):
            self.waited[rank] += steps * (max(own) + network - own[rank])
            self.loaded[rank] += steps * data[rank]
            slot.pace(self.step, self.loaded[rank], self.waited[rank], self.now)
        # It is away at each look, with leave: that changes nothing of what its steps were like.
        self.stage.slots[0].phase(Phase.ALONE, 0, 0, self.now)
        self.pace.tick(self.now)
        return self

    def end(self) -> Training:
        """The ranks leave."""
        for slot in self.stage.slots:
            slot.phase(Phase.ABSENT, 0, 0, self.now)
        self.pace.tick(self.now)
        return self

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for verdict, _ in self.stage.desk.verdicts]


@pytest.mark.parametrize("size", [2, 3, 64])
def test_the_slow_rank_is_named_with_how_its_time_goes(size: int) -> None:
    training = Training(size)
    for _ in range(3):
        training.go([0.2] * (size - 1) + [0.5], data=[0.05] * size)
    [verdict] = training.verdicts
    assert (verdict.kind, verdict.ranks) == ("straggler", [size - 1])
    assert "2.5 times" in verdict.text
    assert f"rank {size - 1}: data 50.0 ms, compute 450.0 ms, waiting 0.0 ms" in verdict.text
    assert "rank 0: data 50.0 ms, compute 150.0 ms, waiting 300.0 ms" in verdict.text
    assert "its own computing" in verdict.text


def test_slow_loading_is_told_from_slow_computing() -> None:
    training = Training(3)
    for _ in range(3):
        training.go([0.2, 0.2, 0.5], data=[0.1, 0.1, 0.4])
    [verdict] = training.verdicts
    assert "waiting for data" in verdict.text


@pytest.mark.parametrize(
    "own",
    [
        [[0.2, 0.29]] * 6,  # under 1.5 times
        [SLOW, SLOW[::-1]] * 4,  # now the one, now the other
        [SLOW, SLOW, EVEN] * 3,  # not three times in a row
        [SLOW] * 2,
    ],
)
def test_what_is_not_persistent_is_no_verdict(own: list[list[float]]) -> None:
    training = Training()
    for seconds in own:
        training.go(seconds)
    assert training.end().verdicts == []


@pytest.mark.parametrize(("network", "told"), [(0.9, 1), (1.1, 0)])  # 0.3 s of 1.4 and of 1.6 s
def test_a_slow_rank_that_costs_little_of_a_step_is_no_straggler(network: float, told: int) -> None:
    training = Training()
    for _ in range(4):
        training.go(SLOW, network=network)
    assert len(training.verdicts) == told


@pytest.mark.parametrize(("steps", "told"), [(7, 0), (8, 1)])
def test_long_steps_are_judged_one_by_one(steps: int, told: int) -> None:
    training = Training()
    for _ in range(steps):
        training.go([1.0, 4.0], steps=1)
    assert len(training.verdicts) == told


def test_a_training_of_a_few_seconds_is_judged_at_its_end() -> None:
    training = Training()
    for _ in range(4):
        training.go([0.02, 0.05], steps=30)
    assert training.verdicts == []
    assert [verdict.ranks for verdict in training.end().verdicts] == [[1]]


def test_what_is_slow_only_at_first_is_no_straggler() -> None:
    training = Training()
    for own in [[0.02, 0.05]] * 3 + [[0.02, 0.02]] * 30:
        training.go(own, steps=60)
    assert training.end().verdicts == []


def test_late_in_a_run_slowness_must_last_longer() -> None:
    training = Training()
    for _ in range(500):
        training.go(EVEN)  # 1000 s
    for _ in range(22):
        training.go(SLOW)  # 110 s, a tenth of all
    assert training.verdicts == []
    assert len(training.go(SLOW).go(SLOW).verdicts) == 1


def test_one_window_in_ten_may_differ() -> None:
    training = Training()
    for _ in range(500):
        training.go(EVEN)
    for own in [SLOW] * 12 + [EVEN] + [SLOW] * 14:
        training.go(own)
    [verdict] = training.verdicts
    assert "2.4 times" in verdict.text  # (22 * 0.5 + 0.2) / (23 * 0.2), after 112 s
