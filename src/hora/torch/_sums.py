"""Sums of a few numbers over the ranks of one optimizer. A rank that has joined adds zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hora.adapter.guard import collective
from hora.torch._context import Context
from hora.torch._process_sets import ProcessSet

__all__ = ["Sums"]


class Sums:
    """Adds up what the ranks of an optimizer have to agree on.

    Args:
        context: of the job.
        process_set: the ranks that take part.
        number: of the optimizer, among those that work over all ranks.
    """

    def __init__(self, context: Context, process_set: ProcessSet, number: int | None) -> None:
        self._context, self._process_set, self._number = context, process_set, number
        self._set_id = process_set.process_set_id or 0

    def add_up(self, what: str, values: Sequence[float], *, name: str = "add up") -> list[float]:
        """The sum of each number over the ranks.

        Args:
            what: one word, told to ranks that have joined.
            values: of this rank.
            name: what the guard calls it.
        """
        self._context.presence.enter(f"{what} {self._number} {len(values)}", self._set_id)
        return self.answer(values, name=name)

    def mean(self, value: float) -> float:
        """The mean over the ranks that have data."""
        total, count = self.add_up("loss", [value, 1.0])
        return total / count

    def answer(self, values: Sequence[float], *, name: str = "add up") -> list[float]:
        """The same on a rank that knows of it already."""
        wire = torch.tensor(values, dtype=torch.float64, device=self._context.control)
        with collective(self._context, name, [wire], process_set=self._process_set):
            self.wait(dist.all_reduce(wire, group=self._process_set.group, async_op=True), wire.device)
        total: list[float] = wire.tolist()
        return total

    def wait(self, work: Any, device: torch.device) -> None:
        """Wait for a message that ranks that have joined answer."""
        self._context.presence.wait(
            work,
            device,
            process_set=self._process_set,
            what="step() of a DistributedOptimizer of some ranks",
            answered=self._set_id == 0,
        )
