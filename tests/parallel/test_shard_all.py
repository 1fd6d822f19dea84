"""shard="all": torch's fully_shard, by one argument, with the results and the checkpoints of one worker."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp  # imported before the ranks are forked
import torch.distributed.tensor
from tests.parallel.shard_net import same_state
from tests.ranks import ranks
from torch import nn

import hora.torch as hora
from hora.core.errors import CollectiveError, GradientError


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(5, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def build(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Layers()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, step: int, *, union: bool) -> torch.Tensor:
    x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    part = 6 // hora.size()
    if not union:
        x = x[hora.rank() * part : (hora.rank() + 1) * part]
    return model(x).square().mean()


def train(model: Any, optimizer: Any, steps: range, *, union: bool) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, union=union).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@ranks(1, 2, 3)
def test_it_trains_as_one_worker_does_and_its_checkpoints_too() -> None:
    model, optimizer = build(seed=hora.rank())  # rank 0's parameters count
    reference, plain = build()
    optimizer = hora.DistributedOptimizer(optimizer, model, shard="all")
    hora.broadcast_parameters(model)
    train(model, optimizer, range(3), union=False)
    train(reference, plain, range(3), union=True)
    state = optimizer.state_dict()
    same_state(state, plain.state_dict())
    there = optimizer.state_dict(root_rank=0)["state"]
    assert there.keys() == (state["state"].keys() if hora.rank() == 0 else set())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(model, optimizer, range(3, 5), union=False)
    train(reference, plain, range(3, 5), union=True)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        full = one.full_tensor() if hora.size() > 1 else one
        assert torch.allclose(full, other, rtol=1e-12, atol=1e-12)
    if hora.size() > 1:
        sizes = [parameter.to_local().numel() for parameter in model.layers.parameters()]
        assert sum(sizes) < sum(parameter.numel() for parameter in reference.layers.parameters())


@ranks(2)
def test_what_fully_shard_does_not_have_is_refused() -> None:
    for options, word in (
        ({"op": hora.Sum}, "op=SUM|op=Sum"),
        ({"compression": hora.Compression.bf16}, "compression"),
        ({"backward_passes_per_step": 2}, "backward_passes_per_step"),
        ({"groups": 2}, "groups"),
    ):
        model, optimizer = build()
        with pytest.raises(GradientError, match=word):
            hora.DistributedOptimizer(optimizer, model, shard="all", **options)
    model, optimizer = build()
    with pytest.raises(GradientError, match="left out"):
        hora.DistributedOptimizer(optimizer, shard="all")
    with pytest.raises(GradientError, match="not one of the module's"):
        hora.DistributedOptimizer(optimizer, model.layers, shard="all")
    train(model, optimizer, range(1), union=True)
    with pytest.raises(GradientError, match="has a state already"):
        hora.DistributedOptimizer(optimizer, model, shard="all")
    model, optimizer = build()
    optimizer = hora.DistributedOptimizer(optimizer, model, shard="all")
    with pytest.raises(GradientError, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(CollectiveError, match="shard="):
        hora.join()
