"""A network, its batches and every optimizer, for the tests of sharded optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hora.torch as hora
from hora.torch.shard._gradient import whole

__all__ = ["OPTIMIZERS", "Net", "loss_of", "net", "same", "same_state", "sharded"]

BATCH = 12
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, maximize=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam-tensor-rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01, dtype=torch.float64)),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.05, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


class Net(nn.Module):
    """A small network in float64 with a shared, a frozen and a tiny layer, and layers used on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.shared = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(()))
        self.one = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, x: torch.Tensor, *, sometimes: bool = False) -> torch.Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.inner(x))))
        x = self.frozen(torch.tanh(self.shared(x))) * self.scale + self.one + self.empty.sum()
        if sometimes:
            x = x + self.sometimes(x)
        return self.head(x)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, dtype=torch.float64, generator=generator)
    return x, x[:, :2] ** 2


def loss_of(
    model: nn.Module, step: int, *, union: bool = False, rank: int | None = None, **options: bool
) -> torch.Tensor:
    """The loss of a rank's part of the batch, or of all of it."""
    x, y = batch(step)
    if not union:
        part, number = BATCH // hora.size(), hora.rank() if rank is None else rank
        here = slice(number * part, (number + 1) * part)
        x, y = x[here], y[here]
    return ((model(x, **options) - y) ** 2).mean()


def same(
    model: nn.Module, reference: nn.Module, *, tolerance: float = 1e-12, gradients: bool = False
) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), name
        assert (ours.grad is None) == (theirs.grad is None), name
        if gradients and ours.grad is not None:
            assert torch.allclose(whole(ours.grad), theirs.grad, rtol=tolerance, atol=tolerance), name


def same_state(ours: Any, theirs: Any, *, tolerance: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entries in theirs["state"].items():
        assert ours["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            mine = ours["state"][number][key]
            if not isinstance(value, torch.Tensor):
                assert mine == value, key
                continue
            assert mine.shape == value.shape, key
            assert mine.dtype is value.dtype, key
            assert torch.allclose(mine, value, rtol=tolerance, atol=tolerance), key


def sharded(model: nn.Module, make: Make = OPTIMIZERS["adamw"], **options: Any) -> Any:
    named = model if options.pop("named", True) else None
    return hora.DistributedOptimizer(make(model.parameters()), named, shard="optimizer", **options)
