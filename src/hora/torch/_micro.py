"""What a loader with ``micro_batch=`` gives for each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hora.core.errors import GlobalBatchError

__all__ = ["Share", "check_micro_batch"]


class Share:
    """A worker's share of one global batch, in parts of at most ``micro_batch`` samples.

    Iterating gives them one after the other, on ``hora.device()``; it may be done again, as by a closure, or
    for another optimizer. Backward passes on all but the last add up on this worker alone, and
    ``DistributedOptimizer`` averages in the last: ``grad`` is then the mean over the global batch, for losses
    that are means over their micro-batch. All ranks have as many, unless a share has fewer samples.

    Args:
        count: how many there are.
        load: gives the next one that was not loaded yet.
        turn: told the number of each when it is handed out.
        end: called when the loop over them has ended.
    """

    def __init__(
        self,
        count: int,
        load: Callable[[], Any],
        turn: Callable[[int], None],
        end: Callable[[], None],
    ) -> None:
        self._count, self._load, self._turn, self._end = count, load, turn, end
        self._loaded: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        try:
            for index in range(self._count):
                if index == len(self._loaded):
                    self._loaded.append(self._load())
                self._turn(index)
                yield self._loaded[index]
        finally:
            self._end()

    def only(self) -> Any:
        """The one of a share that is not cut."""
        batch = self._load()
        self._turn(0)
        return batch

    def load_all(self) -> None:
        """Load what was not asked for."""
        while len(self._loaded) < self._count:
            self._loaded.append(self._load())


def check_micro_batch(micro_batch: object) -> None:
    """Raise GlobalBatchError for what is no number of samples."""
    if micro_batch is None:
        return
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise GlobalBatchError(
            f"micro_batch={micro_batch!r} is not a positive whole number of samples.",
            fix="Write for example micro_batch=32, or leave it out.",
        )
