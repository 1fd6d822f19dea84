"""What rides behind the gradients: are the ranks at the same step, and how many have joined?"""

from __future__ import annotations

import collections
from typing import Any

import torch

from hora.core.errors import GradientError
from hora.torch._context import Context

__all__ = ["Marks", "joined_now"]


class Marks:
    """Reads the marks of each cycle (see ``Bucket``), and checks them.

    Args:
        context: of the job; its presence hears of ranks that have joined, its guard of ranks that part.
    """

    def __init__(self, context: Context) -> None:
        self._presence = context.presence
        self._guard = context.guard
        self._rank = context.world.rank
        self._unchecked: collections.deque[tuple[Any, Any]] = collections.deque()

    def clear(self) -> None:
        """Forget what was not checked."""
        self._unchecked.clear()

    def read(self, marks: torch.Tensor) -> float | torch.Tensor:
        """Keep the marks of a cycle for a check.

        Returns:
            How many ranks have joined; on a GPU a tensor, which nobody has waited for.
        """
        marks = _real(marks)
        if marks.device.type != "cuda":
            values: list[float] = marks.tolist()
            self._unchecked.append((None, values))
            joined = sum(values[2:])
            if joined:
                self._presence.look()
            return joined
        host = torch.empty(marks.shape, dtype=marks.dtype, pin_memory=True)
        host.copy_(marks, non_blocking=True)
        event = torch.Event(device=marks.device)
        event.record()
        self._unchecked.append((event, host))
        return marks[2:].sum(dtype=torch.float32)

    def check(self, *, step: int, wait: bool) -> None:
        """Both marks set: some rank is at an odd step and another at an even one.

        On a GPU the marks of a cycle are looked at when they have come over, without waiting for them.

        Args:
            step: this rank's, for messages.
            wait: whether to wait for them on a GPU too.
        """
        while self._unchecked:
            event, marks = self._unchecked[0]
            if event is not None and not wait and not event.query():
                return
            self._unchecked.popleft()
            even, odd, *joined = marks if event is None else marks.tolist()
            if event is not None and any(joined):
                self._presence.look()
            if even and odd:
                error = GradientError(
                    "The ranks made different numbers of backward passes before step(), so gradients of "
                    f"different steps met; rank {self._rank} is at step {step}.",
                    fix="Make the same number of backward passes on every rank; data_loader(tail='uneven') "
                    "gives every rank the same number of batches, and hora.join() ends with fewer.",
                )
                if self._guard is not None:
                    self._guard.parted(error)
                raise error


def joined_now(marks: torch.Tensor) -> int:
    """How many ranks have joined, waiting for the number on a GPU."""
    counts: list[float] = _real(marks)[2:].tolist()
    return round(sum(counts))


def _real(marks: torch.Tensor) -> torch.Tensor:
    return marks.real if marks.is_complex() else marks
