"""``hora.only``, and the rule that presentation calls no collective."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import ranks

import hora.torch as hora
from hora.core.errors import CollectiveError, UsageError
from hora.core.presentation import presenting


@ranks(1, 2)
def test_only_tells_whose_work_it_is() -> None:
    with hora.only(0, reason="evaluation") as mine:
        assert mine == (hora.rank() == 0)
    assert bool(hora.only([0])) == (hora.rank() == 0)
    with hora.only() as mine:
        assert mine
    with pytest.raises(UsageError, match="not a rank of this job"):
        hora.only(hora.size())


@ranks(2)
@pytest.mark.parametrize("call", ["mean", "allreduce", "broadcast_object"])
def test_presentation_calls_no_collective(call: str) -> None:
    with presenting(), pytest.raises(CollectiveError, match="while something is shown"):
        {
            "mean": lambda: hora.mean(1.0),
            "allreduce": lambda: hora.allreduce(torch.ones(1)),
            "broadcast_object": lambda: hora.broadcast_object({}, 0),
        }[call]()
    assert hora.mean(float(hora.rank())) == 0.5


@ranks(2)
def test_a_value_that_reduces_itself_when_shown_is_refused() -> None:
    class Lazy(torch.Tensor):
        def detach(self) -> torch.Tensor:
            return hora.allreduce(torch.ones(1))

    tracker = hora.track([1, 2], epochs=1)
    for _ in tracker:
        if hora.rank() == 0:
            with pytest.raises(CollectiveError, match="while something is shown"):
                tracker.log(loss=torch.ones(1).as_subclass(Lazy))
