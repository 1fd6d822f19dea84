"""A small training whose every part a checkpoint has to hold."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import hora.torch as hora


class Training:
    """Convolution, batch norm, dropout, AdamW, a schedule, and a loader, in float64.

    Args:
        shard: of the optimizer.
    """

    def __init__(self, shard: Any = None) -> None:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 6, 3, bias=False),
            torch.nn.BatchNorm2d(6),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(24, 3),
        ).double()
        if shard != "all":  # which FSDP2 does not take
            model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(
            [
                {"params": model[0].parameters(), "lr": 0.02},
                {"params": [*model[1].parameters(), *model[4].parameters()]},
            ],
            lr=0.01,
        )
        self.optimizer = hora.DistributedOptimizer(optimizer, model, shard=shard)
        hora.broadcast_parameters(model, root_rank=0)
        self.model = model
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        generator = torch.Generator().manual_seed(3)
        data = torch.randn(48, 2, 4, 4, dtype=torch.float64, generator=generator)
        self.loader = hora.data_loader((data, data.sum(dim=(1, 2, 3))), global_batch=12)
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "loader": self.loader,
            "generator": generator,
            "best": [float("inf"), None],
        }
        self._batches = itertools.chain.from_iterable(self.loader for _ in itertools.count())
        torch.manual_seed(100 + hora.rank())

    def steps(self, count: int) -> list[float]:
        """Losses of so many steps."""
        losses: list[float] = []
        for x, y in itertools.islice(self._batches, count):
            self.optimizer.zero_grad()
            loss = (self.model(x).sum(dim=1) - y).square().mean()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and the optimizer's state, whole, whatever ``shard`` is. Every rank calls it."""
        found = {
            f"model {name}": whole(value).detach().clone() for name, value in self.model.named_parameters()
        }
        for number, entries in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer {number} {name}": value.clone() for name, value in entries.items()}
        return found


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether all bits are the same."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
