"""What a rank keeps of its batches, so that another run can use them too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hora.core.recording import Source

__all__ = ["Given", "Kept", "Passage", "copied", "joined", "places_that_differ", "union"]


@dataclass
class Given:
    """A batch that the script was given; ``source`` as in :class:`hora.core.recording.Batch`."""

    samples: list[str]
    source: Source
    content: list[str] = field(default_factory=list)
    loader: int | None = None


@dataclass
class Passage:
    """One iteration over a loader: the samples of each batch, and their positions (Hora's loader only).

    A loader of an iterable data set has no numbers for its samples; the batches themselves are kept.
    """

    batches: list[list[Any]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    whole: bool = False


@dataclass
class Kept:
    """What a replay needs: passages by loader, and tensors by step, place in the script and turn."""

    passages: dict[int, list[Passage]] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    cuts: dict[tuple[int, str, int], torch.Tensor] = field(default_factory=dict)


def copied(batch: Any) -> Any:
    return joined([batch])


def joined(parts: Sequence[Any]) -> Any:
    """Batches of one form put behind each other; what is no tensor is taken from the first."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat([part.detach().cpu() for part in parts]) if first.dim() else first.clone()
    if isinstance(first, Mapping):
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple) and not hasattr(first, "_fields"):
        return type(first)(joined([part[place] for part in parts]) for place in range(len(first)))
    return first


def union(recorded: Sequence[Passage]) -> Iterator[tuple[list[Any], int]]:
    """The batches of all ranks together, in the order of ranks, and the position of the first sample."""
    for index in range(max(len(passage.batches) for passage in recorded)):
        parts = [passage.batches[index] for passage in recorded if index < len(passage.batches)]
        spans = [passage.spans[index] for passage in recorded if index < len(passage.spans)]
        yield [sample for part in parts for sample in part], min((start for start, _ in spans), default=0)


def places_that_differ(kept: Sequence[Kept]) -> set[str]:
    """Places in the script where the ranks have cut out different rows at least once."""
    differ = set()
    for key in {key for one in kept for key in one.cuts}:
        parts = [one.cuts.get(key) for one in kept]
        first = parts[0]
        if first is None or any(part is None or not torch.equal(first, part) for part in parts[1:]):
            differ.add(key[1])
    return differ
