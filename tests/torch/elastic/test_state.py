"""What a state holds: all of its attributes, whether they were given to it or set later."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hora.torch as hora
from hora.core.errors import NotInitializedError, UsageError
from hora.core.world import World


@pytest.fixture
def alone() -> Iterator[None]:
    hora.init(World())
    yield
    hora.shutdown()


def test_attributes_set_later_go_back_too() -> None:
    state = hora.elastic.ObjectState(best=1.0)
    state.seen = [1]
    state.save()
    state.seen.append(2)
    state.best = 3.0
    state.late = "since the last commit"
    state.restore()
    assert (state.best, state.seen) == (1.0, [1])
    assert not hasattr(state, "late")


def test_a_part_set_later_is_a_part(alone: None) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = hora.elastic.TorchState(model=model, optimizer=optimizer)
    state.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state.save()
    kept = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.schedule.step()
    state.averaged = torch.nn.Linear(2, 1)
    state.restore()
    assert torch.equal(model.weight, kept)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert state.schedule.last_epoch == 0
    assert not hasattr(state, "averaged")


def test_before_init_is_told() -> None:
    with pytest.raises(NotInitializedError, match=r"hora\.torch\.elastic\.TorchState\(\) was called before"):
        hora.elastic.TorchState(step=0)


def test_what_is_not_given_is_no_attribute(alone: None) -> None:
    assert not hasattr(hora.elastic.TorchState(step=0), "model")


def test_names_of_its_own_are_refused() -> None:
    with pytest.raises(UsageError, match="commit="):
        hora.elastic.ObjectState(commit=1)
