"""Who is slow by itself?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.guard.stage import Stage

from hora.guard.board import Phase
from hora.guard.pace import Pace
from hora.guard.verdict import Verdict


def watched(own: Sequence[Sequence[float]], *, data: Sequence[float]) -> list[Verdict]:
    """The verdicts after windows of 10 steps in which each rank computes and loads for so long per step.

    The ranks wait for the slowest at each step, as an all-reduce makes them do.
    """
    stage = Stage(len(data))
    pace = Pace(stage.judge, seconds=1.0, steps=10, windows=3)
    for slot in stage.slots:
        slot.phase(Phase.RUNNING, 0, 0, 0.0)
        slot.pace(1, 0.0, 0.0, 0.0)
    pace.tick(0.0)
    waited = [0.0] * stage.size
    loaded = [0.0] * stage.size
    now = 0.0
    for window, seconds in enumerate(own, 1):
        longest = max(seconds)
        now += 10 * longest
        for rank, slot in enumerate(stage.slots):
            waited[rank] += 10 * (longest - seconds[rank])
            loaded[rank] += 10 * data[rank]
            slot.pace(1 + 10 * window, loaded[rank], waited[rank], now)
        # It is away at each look, with leave: that changes nothing of what its steps were like.
        stage.slots[0].phase(Phase.ALONE, 0, 0, now)
        pace.tick(now)
    return [verdict for verdict, _ in stage.desk.verdicts]


@pytest.mark.parametrize("size", [2, 3, 64])
def test_the_slow_rank_is_named_with_how_its_time_goes(size: int) -> None:
    own = [[0.2] * (size - 1) + [0.5]] * 3
    [verdict] = watched(own, data=[0.05] * size)
    assert (verdict.kind, verdict.ranks) == ("straggler", [size - 1])
    assert "2.5 times" in verdict.text
    assert f"rank {size - 1}: data 50.0 ms, compute 450.0 ms, waiting 0.0 ms" in verdict.text
    assert "rank 0: data 50.0 ms, compute 150.0 ms, waiting 300.0 ms" in verdict.text
    assert "its own computing" in verdict.text


def test_slow_loading_is_told_from_slow_computing() -> None:
    [verdict] = watched([[0.2, 0.2, 0.5]] * 3, data=[0.1, 0.1, 0.4])
    assert "waiting for data" in verdict.text


@pytest.mark.parametrize(
    "own",
    [
        [[0.2, 0.29]] * 6,  # under 1.5 times
        [[0.2, 0.5], [0.5, 0.2]] * 4,  # now the one, now the other
        [[0.2, 0.5], [0.2, 0.5], [0.2, 0.2]] * 3,  # not three times in a row
        [[0.2, 0.5]] * 2,
    ],
)
def test_what_is_not_persistent_is_no_verdict(own: list[list[float]]) -> None:
    assert watched(own, data=[0.0, 0.0]) == []
