"""Micro-batches: one step's share of a global batch in parts, whose backward passes add up to one gradient.

A loss is the mean over its micro-batch, so that gradients of micro-batches of different sizes count
differently. What ``grad`` holds while they add up is in units of the micro-batch that is with the script. It
is brought to another's when that one is handed out, which costs nothing where both have the same size.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from hora.core.errors import GradientError

__all__ = ["Passes", "Turn"]


class User(Protocol):
    """Who adds gradients up."""

    def begin_turn(self, weight: float, *, index: int, count: int) -> None:
        """Another micro-batch is handed out."""


class Turn:
    """What the script computes on now, of what a loader hands out.

    Attributes:
        weight: of this rank's next gradients in an average over the ranks: samples that they are the mean of,
            relative to an even share of the global batch.
        index: number of the micro-batch in its step.
        count: micro-batches of the step; 1 where shares are not cut.
    """

    def __init__(self) -> None:
        self.weight, self.index, self.count = 1.0, 0, 1
        self._users: weakref.WeakSet[User] = weakref.WeakSet()

    @property
    def more(self) -> bool:
        """Whether further micro-batches of this step follow."""
        return self.index + 1 < self.count

    def join(self, user: User) -> None:
        """Tell ``user`` of each micro-batch from now on."""
        self._users.add(user)

    def begin(self, weight: float, *, index: int = 0, count: int = 1) -> None:
        """A batch, or a micro-batch, is handed out."""
        for user in list(self._users):
            user.begin_turn(weight, index=index, count=count)
        self.weight, self.index, self.count = weight, index, count

    def end(self) -> None:
        """The loop over the micro-batches has ended."""
        self.index, self.count = 0, 1


class Passes:
    """The backward passes of one optimizer since its last step.

    Args:
        turn: what they are made on.
        wanted: how many batches add up before a reduction; 1 reduces at each.
        once: whether a gradient must not be reduced twice.

    Attributes:
        count: batches that have added up; all micro-batches of one count as one.
    """

    def __init__(self, turn: Turn, *, wanted: int, once: bool) -> None:
        self._turn = turn
        self._wanted, self._once = wanted, once
        self.count = 0
        self._any = False
        self._made = 0  # in this micro-batch
        self._usual: int | None = None  # in the first one of this step
        self._weight = 1.0  # of what grad holds
        self._averaged = False

    def clear(self) -> None:
        """There was a step, or the gradients were cleared."""
        self.count, self._any = 0, False

    def reduced(self) -> None:
        """What ``grad`` holds is the average over the ranks now."""
        self._weight, self._averaged = 1.0, True

    def begin(self) -> bool:
        """Another pass begins; whether it is one of those that only add up on this rank.

        Raises:
            GradientError: it comes after the reduction, which is made once.
        """
        turn = self._turn
        if self._once and self.count >= self._wanted:
            raise GradientError(
                f"A backward pass more than backward_passes_per_step={self._wanted} before step(): with "
                "that, op=hora.Sum, PowerSGD or TopK, gradients are reduced once.",
                fix="Call step() or zero_grad() first, or give the number of passes that you make.",
            )
        self._made += 1
        self._any, self._averaged = True, False
        usual = (self._usual or 1) if turn.count > 1 else 1
        if turn.more or self._made < usual:
            self._weight = turn.weight
            return True
        if turn.count > 1 and self._made > usual:
            raise GradientError(
                f"The last of {turn.count} micro-batches has {self._made} backward passes, the first had "
                f"{usual}: its gradients are averaged over the ranks after as many.",
                fix="Make the same number of backward passes on each micro-batch.",
            )
        self.count += 1
        self._weight = turn.weight
        return False

    @property
    def due(self) -> bool:
        """Whether the pass that has begun ends with a reduction."""
        return (
            self.count >= self._wanted
            and not self._turn.more
            and (self._turn.count == 1 or self._made >= (self._usual or 1))
        )

    def turn_to(
        self, weight: float, named: Sequence[tuple[str, torch.Tensor]], *, index: int, count: int
    ) -> bool:
        """Another micro-batch comes: bring what ``grad`` holds to its units; whether that was necessary."""
        if index == 0:
            self._usual = None
        elif index == 1:
            self._usual = self._made
        self._made = 0
        # Averages may stay where each rank has one batch: the weights of all add up to their number.
        if not self._any or weight in (0.0, self._weight) or (count == 1 and self._averaged):
            return False
        gradients = [
            parameter.grad
            for _, parameter in named
            if parameter.grad is not None and type(parameter.grad) is torch.Tensor
        ]
        if gradients:
            torch._foreach_mul_(gradients, self._weight / weight)
        self._weight, self._averaged = weight, False
        return True

    def check_step(self) -> None:
        """Raise GradientError for a step in the midst of the micro-batches."""
        if self._turn.more:
            raise GradientError(
                f"step() came after micro-batch {self._turn.index + 1} of {self._turn.count}.",
                fix="Write it behind the loop over the micro-batches, as all that is done once per step.",
            )

    def check_zero(self) -> None:
        """Raise GradientError where gradients of earlier micro-batches would be lost."""
        if self._turn.index and self._any:
            raise GradientError(
                f"zero_grad() came at micro-batch {self._turn.index + 1} of {self._turn.count}: the "
                "gradients of those before would be lost.",
                fix="Write it in front of the loop over the micro-batches.",
            )

    def check_join(self) -> None:
        """Raise GradientError where gradients that have not been reduced would be lost."""
        if self._wanted > 1 and self.count:
            raise GradientError(
                f"join() was called after {self.count} of backward_passes_per_step={self._wanted} backward "
                "passes, whose gradients would be lost.",
                fix="Call optimizer.step() before hora.join(): it averages fewer passes too.",
            )
