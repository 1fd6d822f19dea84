"""A contender that does not do the work is found out before it is timed."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

from _collectives import COLLECTIVES, prepared
from _trainers import different


class Three:
    """Rank 1 of three: what the other two would send is known, so it is filled in."""

    rank, size = 1, 3

    def __init__(self, *, broken: str = "") -> None:
        self._broken = broken

    def empty(self, count: int) -> Any:
        return numpy.empty(count, numpy.float32)

    def barrier(self) -> None:
        pass

    def _give(self, name: str, target: Any, values: list[float]) -> None:
        if name != self._broken:
            target.reshape(len(values), -1)[...] = numpy.array(values)[:, None]

    def all_reduce(self, array: Any) -> None:
        self._give("all-reduce", array, [1 + 2 + 3])

    def reduce_scatter(self, target: Any, source: Any) -> None:
        assert len(source) == 3 * len(target)
        self._give("reduce-scatter", target, [1 + 2 + 3])

    def all_gather(self, target: Any, source: Any) -> None:
        assert len(target) == 3 * len(source)
        self._give("all-gather", target, [1, 2, 3])

    def broadcast(self, array: Any) -> None:
        self._give("broadcast", array, [1])

    def all_to_all(self, target: Any, source: Any) -> None:
        assert source.reshape(3, -1)[:, 0].tolist() == [100, 101, 102]
        self._give("all-to-all", target, [1, 101, 201])


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_collective_with_a_wrong_result_is_refused(collective: str, size: int) -> None:
    right, wrong = Three(), Three(broken=collective)
    prepared(collective, size, right, right.empty)
    with pytest.raises(AssertionError, match=f"{collective} of {size} bytes gives a wrong result"):
        prepared(collective, size, wrong, wrong.empty)


def test_a_training_with_another_loss_is_found_out() -> None:
    losses = {"one worker": 1.0, "apart": 1.0, "DDP": 2.0}
    losses |= {"Hora": 2.0 + 1e-5, "FSDP2": 2.0 + 1e-3, "Fabric": math.nan}
    assert different(losses) == {
        "FSDP2": "its loss is 2.001000, that of DDP 2.000000",
        "Fabric": "its loss is nan, that of DDP 2.000000",
    }
    assert different({"one worker": 1.0, "Hora": 2.0}) == {}
