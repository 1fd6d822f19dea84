"""Which anchors and regions are learned from. Chance is a function of (seed, epoch, picture, place)."""

from __future__ import annotations

import torch
from torch import Tensor

from hora.workloads.resnet.augment import uniform
from hora.workloads.scenes.boxes import overlap

__all__ = ["chance", "choose", "match"]


def chance(numbers: Tensor, places: int, *, seed: int, epoch: int) -> Tensor:
    """Uniform numbers in [0, 1), float64, [pictures, places]; the same on whichever worker.

    Args:
        numbers: int64, [pictures], of the pictures in their data set.
        places: anchors or regions of a picture.
        seed: of the run, and of what the numbers are for.
        epoch: from 0.
    """
    drawn = uniform(numbers.cpu().numpy(), seed=seed, epoch=epoch, draws=places)
    return torch.from_numpy(drawn).to(numbers.device)


def match(
    boxes: Tensor, objects: Tensor, *, positive: float, negative: float, best_too: bool
) -> tuple[Tensor, Tensor]:
    """What each box is to find in one picture.

    Args:
        boxes: [n, 4], anchors or regions.
        objects: [m, 4].
        positive: overlap from which a box is to find the object that it overlaps most.
        negative: overlap below which it is to find nothing.
        best_too: whether the boxes that overlap an object most are to find it, however little that is.

    Returns:
        int64 [n]: the object, 0 where there is none; and int8 [n]: 1 positive, 0 negative, -1 neither.
    """
    if not len(objects):
        nothing = torch.zeros(len(boxes), dtype=torch.long, device=boxes.device)
        return nothing, nothing.to(torch.int8)
    shared = overlap(objects, boxes)
    most, which = shared.max(dim=0)
    kind = torch.full((len(boxes),), -1, dtype=torch.int8, device=boxes.device)
    kind[most < negative] = 0
    kind[most >= positive] = 1
    if best_too:
        best = shared.amax(dim=1, keepdim=True)
        kind[((shared == best) & (best > 0)).any(dim=0)] = 1
    return which, kind


def choose(kind: Tensor, chances: Tensor, *, number: int, positive_part: float) -> tuple[Tensor, Tensor]:
    """The positive and the negative ones to learn from, in each picture: bool [pictures, n], twice.

    At most ``positive_part * number`` are positive; negative ones fill up to ``number``.

    Args:
        kind: [pictures, n]: 1 positive, 0 negative, -1 neither.
        chances: [pictures, n]; those with the smallest are taken.
        number: in each picture.
        positive_part: 0 to 1.
    """
    positive = _first(kind == 1, chances, torch.tensor(int(positive_part * number), device=kind.device))
    room = number - positive.sum(dim=1)
    return positive, _first(kind == 0, chances, room)


def _first(wanted: Tensor, chances: Tensor, most: Tensor) -> Tensor:
    """Of those wanted, the ones with the smallest chances: at most ``most`` in each row."""
    order = chances.masked_fill(~wanted, 2.0).argsort(dim=1, stable=True)
    places = torch.arange(chances.shape[1], device=chances.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return wanted & (rank < most.reshape(-1, 1))
