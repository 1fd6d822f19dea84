"""What the guard notes of the messages that average gradients."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import torch
from tests.torch.test_watch import Supervisor, linear, step, watched

import hora.torch as hora
from hora.torch import _context
from hora.torch.engines import Group


def gradient_calls(supervisor: Supervisor) -> list[dict[str, Any]]:
    calls = supervisor.all("call")
    return [call for call in calls if call["signature"]["collective"] == "average gradients"]


def test_each_line_with_a_backward_pass_is_a_call_of_its_own() -> None:
    def body(supervisor: Supervisor) -> None:
        model = linear()
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        values = torch.ones(2, 4)
        for index in range(6):
            optimizer.zero_grad()
            if index % 3 == 2:
                model(values).sum().backward()
            else:
                model(values).mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # without a backward pass the gradients leave in step() itself
        found = gradient_calls(supervisor)
        first = test_each_line_with_a_backward_pass_is_a_call_of_its_own.__code__.co_firstlineno
        lines = [int(call["where"].rpartition(":")[2]) - first for call in found]
        assert lines == [10, 8, 13]
        one, other, last = (call["id"] for call in found)
        entries = [
            entry for entry in supervisor.board.entries(hora.rank()) if entry.call in (one, other, last)
        ]
        assert [entry.call for entry in entries] == [one, one, other, one, one, other, last]
        numbers = [entry.number for entry in entries]
        assert numbers == list(range(numbers[0], numbers[0] + 7))
        assert len({entry.history for entry in entries}) == 7

    watched(body, 2)


def test_gradients_wait_longer_for_a_rank_than_gloo_would() -> None:
    def body(supervisor: Supervisor) -> float:
        guard = _context.context().guard
        assert guard is not None
        model = linear()
        optimizer = hora.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
        step(model, optimizer)
        [patient] = guard.patient.values()
        engine = patient._engine
        engine._set_default_timeout(datetime.timedelta(seconds=0.1))
        if hora.rank() == 1:
            threading.Event().wait(0.6)
        step(model, optimizer)
        engine._set_default_timeout(guard.timeout)
        return guard.reporter.waited

    waited = watched(body, 2, engine="gloo")
    assert waited[0] > 0.3


def test_ranks_in_shared_memory_wait_until_the_supervisor_says_otherwise() -> None:
    def body(supervisor: Supervisor) -> float:
        group = _context.context().group
        assert isinstance(group, Group)
        return float(group.team.timeout)

    assert min(watched(body, 2, engine="shared-memory")) > 24 * 3600
