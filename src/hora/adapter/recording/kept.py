"""What a rank keeps of its batches, so that another run can use them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hora.core.recording import Source

__all__ = ["LIMIT", "Given", "Kept", "leaves", "mapped"]

LIMIT = 2**28
"""Bytes of batches that a rank keeps for a replay."""


@dataclass
class Given:
    """A batch that the script was given; ``source`` as in :class:`hora.core.recording.Batch`."""

    samples: list[str]
    source: Source
    content: list[str] = field(default_factory=list)
    place: str = ""


@dataclass
class Kept:
    """What a replay needs: names and arrays of batches, by where they were handed out, and in which order.

    Attributes:
        batches: names of the samples, and the arrays of the batch.
        trained: places whose batches were trained on.
    """

    batches: dict[tuple[str, int], tuple[list[str], list[NDArray[Any]]]] = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)

    def differs(self, others: Sequence[Kept], place: str) -> bool:
        """Whether some other rank was handed other arrays there at least once."""
        return any(
            key[0] == place and not _alike(arrays, other.batches.get(key, ([], []))[1])
            for other in others
            for key, (_, arrays) in self.batches.items()
        )


def _alike(one: Sequence[NDArray[Any]], other: Sequence[NDArray[Any]]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def leaves(batch: Any) -> Iterator[Any]:
    """What is in a batch of dicts, lists and tuples, in their order."""
    if isinstance(batch, Mapping):
        for value in batch.values():
            yield from leaves(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)
    elif batch is not None:
        yield batch


def mapped(change: Callable[[Any], Any], batch: Any) -> Any:
    """The batch, with each of its :func:`leaves` changed."""
    if isinstance(batch, Mapping):
        return {key: mapped(change, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [mapped(change, value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return None if batch is None else change(batch)
