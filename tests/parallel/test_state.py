"""Broadcasts of parameters, buffers and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import ranks
from torch import nn

import hora.torch as hora
from hora.core.errors import CollectiveError


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(3),
        nn.Flatten(),
        nn.Linear(12, 2).double(),
        nn.Linear(2, 2).bfloat16(),
    )
    net.register_buffer("seen", torch.full((), seed, dtype=torch.int64), persistent=False)
    net.register_buffer("empty", torch.empty(0))
    net[1].running_mean.fill_(seed)
    return net


@ranks(1, 2, 3)
def test_parameters_and_buffers_become_the_roots() -> None:
    for root in range(hora.size()):
        net, expected = model(hora.rank() + 1), model(root + 1)
        tied = net[3].weight
        hora.broadcast_parameters(net, root_rank=root)
        assert net[3].weight is tied
        assert tied.requires_grad
        for ours, theirs in zip(
            [*net.parameters(), *net.buffers()], [*expected.parameters(), *expected.buffers()], strict=True
        ):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
        other = model(hora.rank() + 1)
        hora.broadcast_parameters(other.state_dict(), root_rank=root)
        assert torch.equal(other[3].weight, expected[3].weight)
        pairs = model(hora.rank() + 1)
        hora.broadcast_parameters(pairs.named_parameters(), root_rank=root)
        assert torch.equal(pairs[4].bias, expected[4].bias)


@ranks(3)
def test_models_that_differ_are_told_where() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 if hora.rank() == 1 else 2))
    with pytest.raises(
        CollectiveError, match=r"2 is 1.weight .*\(2, 2\)\) on rank 0 and 1.weight .*\(3, 2\)"
    ):
        hora.broadcast_parameters(net)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(CollectiveError, match="rank 0 has 4 of them and rank 2 has 3"):
        hora.broadcast_parameters(list(net.named_parameters())[: 3 if hora.rank() == 2 else 4])
    with pytest.raises(CollectiveError, match="0.weight is on meta"):
        hora.broadcast_parameters(net.to("meta"))
    with pytest.raises(CollectiveError, match="'step' is a int, not a tensor"):
        hora.broadcast_parameters({"step": 3})
    hora.barrier()


def train(optimizer: torch.optim.Optimizer, weight: torch.Tensor, steps: int) -> None:
    for step in range(steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = ((weight - step) ** 4).sum()
            loss.backward()
            return loss

        optimizer.step(closure)


MAKERS: dict[str, Callable[[torch.Tensor], torch.optim.Optimizer]] = {
    "sgd": lambda weight: torch.optim.SGD([weight], lr=0.01, momentum=0.9),
    "adamw": lambda weight: torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5, amsgrad=True),
    "tensor lr": lambda weight: torch.optim.Adam([weight], lr=torch.tensor(0.1)),
    "fused": lambda weight: torch.optim.AdamW([weight], lr=0.1, fused=True),
    "adagrad": lambda weight: torch.optim.Adagrad([weight], lr=0.1),
    "rmsprop": lambda weight: torch.optim.RMSprop([weight], lr=0.1, centered=True),
    "asgd": lambda weight: torch.optim.ASGD([weight], lr=0.1),
    "rprop": lambda weight: torch.optim.Rprop([weight], lr=0.1),
    "lbfgs": lambda weight: torch.optim.LBFGS([weight], lr=0.1, max_iter=3),
}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


@ranks(2)
def test_optimizer_state_becomes_the_roots_without_a_step() -> None:
    for name, make in MAKERS.items():
        for root_steps, other_steps in ((0, 0), (3, 0), (0, 2), (3, 2)):
            weight = nn.Parameter(torch.full((3,), 2.0 + hora.rank()))
            optimizer = make(weight)
            train(optimizer, weight, root_steps if hora.rank() == 0 else other_steps)
            optimizer.param_groups[0]["note"] = {
                "rank": hora.rank(),
                "nested": [torch.tensor(hora.rank()), None],
            }
            before = weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
            rate = optimizer.param_groups[0]["lr"]
            hora.broadcast_optimizer_state(optimizer)
            assert torch.equal(weight, before[0]), name
            expected = hora.broadcast_object(before[1])
            assert alike(optimizer.state_dict(), expected), (name, root_steps, other_steps)
            if isinstance(rate, torch.Tensor):
                assert optimizer.param_groups[0]["lr"] is rate
            train(optimizer, weight, 1)  # what arrived can be trained on


@ranks(2)
def test_optimizers_with_other_groups_are_told_so() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2 + hora.rank())]
    with pytest.raises(CollectiveError, match="0 is a group of 2 parameters on rank 0 and a group of 3"):
        hora.broadcast_optimizer_state(torch.optim.SGD(weights, lr=1.0))
