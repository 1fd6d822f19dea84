"""Post-local SGD, against a simulation of all workers in one process."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import ranks
from torch import nn

import hora.torch as hora
from hora.core.errors import UsageError
from hora.torch.optim import LARS, PostLocalSGD

STEPS, START, PERIOD = 9, 2, 3
LR, MOMENTUM = 0.05, 0.9


def data(step: int, rank: int) -> tuple[Any, Any]:
    random = np.random.default_rng([step, rank])
    return random.normal(size=(4, 3)), random.normal(size=4)


def simulate(workers: int, *, state: bool) -> list[Any]:
    """The parameters of all workers after all steps."""
    weights = [np.ones(3) for _ in range(workers)]
    momenta = [np.zeros(3) for _ in range(workers)]
    for step in range(STEPS):
        gradients = []
        for rank, w in enumerate(weights):
            x, y = data(step, rank)
            gradients.append(2 * x.T @ (x @ w - y) / len(y))
        if step < START:
            gradients = [np.mean(gradients, axis=0)] * workers
        momenta = [MOMENTUM * m + g for m, g in zip(momenta, gradients, strict=True)]
        weights = [w - LR * m for w, m in zip(weights, momenta, strict=True)]
        if step >= START and (step + 1 - START) % PERIOD == 0:
            weights = [np.mean(weights, axis=0)] * workers
            momenta = [np.mean(momenta, axis=0)] * workers if state else momenta
    return weights


def train(steps: range, model: Any, optimizer: Any) -> None:
    for step in steps:
        x, y = (torch.tensor(part) for part in data(step, hora.rank()))
        optimizer.zero_grad()
        ((model(x).squeeze(1) - y) ** 2).mean().backward()
        optimizer.step()


def build(**options: Any) -> tuple[Any, Any, PostLocalSGD]:
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    optimizer = hora.DistributedOptimizer(sgd, model)
    return model, optimizer, PostLocalSGD(optimizer, start=START, period=PERIOD, **options)


@ranks(1, 2, 3)
def test_workers_step_by_themselves_and_average() -> None:
    for state in (False, True):
        model, optimizer, local = build(state=state)
        assert local.apart == (START == 0)
        train(range(STEPS), model, optimizer)
        assert local.apart
        expected = simulate(hora.size(), state=state)
        np.testing.assert_allclose(model.weight.detach().numpy()[0], expected[hora.rank()], rtol=1e-12)
        local.average()
        np.testing.assert_allclose(model.weight.detach().numpy()[0], np.mean(expected, axis=0), rtol=1e-12)


@ranks(2)
def test_a_checkpoint_after_an_averaging_step_goes_on_the_same() -> None:
    model, optimizer, local = build(state=True)
    train(range(5), model, optimizer)  # 2 and one period: just averaged
    kept = copy.deepcopy([each.state_dict() for each in (model, optimizer, local)])
    train(range(5, STEPS), model, optimizer)
    other, again, resumed = build(state=True)
    for each, state in zip((other, again, resumed), kept, strict=True):
        each.load_state_dict(state)
    assert resumed.apart
    train(range(5, STEPS), other, again)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(UsageError, match="before that"):
        resumed.load_state_dict({"steps": 0})


@ranks(2)
def test_from_the_first_step_with_passes_and_another_optimizer() -> None:
    """Local from the start, of period 1: the mean of both workers' own steps."""
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.ones_(model.weight)
    optimizer = hora.DistributedOptimizer(LARS(model.parameters(), 1.0), model, backward_passes_per_step=2)
    PostLocalSGD(optimizer, start=0, period=1)
    weights = []
    for rank in range(2):
        other = nn.Linear(3, 1, bias=False).double()
        nn.init.ones_(other.weight)
        for part in (0, 1):
            x, y = (torch.tensor(value) for value in data(part, rank))
            (((other(x).squeeze(1) - y) ** 2).mean() / 2).backward()
        LARS(other.parameters(), 1.0).step()
        weights.append(other.weight.detach())
    for part in (0, 1):
        x, y = (torch.tensor(value) for value in data(part, hora.rank()))
        ((model(x).squeeze(1) - y) ** 2).mean().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), (weights[0] + weights[1]) / 2, rtol=1e-13, atol=0)


@ranks(2)
def test_what_does_not_go_with_it_is_refused() -> None:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="plain SGD"):
        PostLocalSGD(sgd, start=0, period=2)
    optimizer = hora.DistributedOptimizer(sgd, model, shard="optimizer")
    with pytest.raises(UsageError, match="shard"):
        PostLocalSGD(optimizer, start=0, period=2)
    with pytest.raises(UsageError, match="period"):
        PostLocalSGD(optimizer, start=0, period=0)
