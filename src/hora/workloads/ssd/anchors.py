"""SSD's default boxes, and which of them is to find which object.

W. Liu et al., "SSD: Single Shot MultiBox Detector", arXiv:1512.02325, section 2.2. Everything here is in
fractions of the picture's sides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hora.workloads.scenes.boxes import overlap
from hora.workloads.ssd.config import ModelConfig

__all__ = ["WEIGHTS", "default_boxes", "match"]

WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""One over the variances 0.1 and 0.2, by which SSD divides what is to be predicted."""
ENOUGH = 0.5
"""Overlap from which a default box is to find an object."""


def default_boxes(config: ModelConfig) -> Tensor:
    """float32, [boxes, 4]: left, top, right, bottom; may reach out of the picture.

    The order is that of the network's outputs: maps from fine to coarse, rows, columns, then for each cell a
    square of the map's scale, one between this and the next scale, and for each aspect ratio two.
    """
    side = config.side
    found: list[tuple[float, float, float, float]] = []
    for index, (cells, stride, ratios) in enumerate(
        zip(config.maps, config.strides, config.ratios, strict=True)
    ):
        scale, following = config.scales[index] / side, config.scales[index + 1] / side
        between = math.sqrt(scale * following)
        sizes = [(scale, scale), (between, between)]
        for ratio in ratios:
            wide, high = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
            sizes += [(wide, high), (high, wide)]
        for row, column in itertools.product(range(cells), repeat=2):
            x, y = (column + 0.5) * stride / side, (row + 0.5) * stride / side
            found += [
                (x - width / 2, y - height / 2, x + width / 2, y + height / 2) for width, height in sizes
            ]
    return torch.tensor(found)


def match(boxes: Sequence[Tensor], labels: Sequence[Tensor], anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Which object each default box is to find, for each picture of a batch.

    Each object gets the default box that overlaps it most; every other default box that overlaps an object
    by more than 0.5 is to find the one that it overlaps most.

    Args:
        boxes: for each picture [objects, 4], in fractions.
        labels: for each picture [objects], from 0.
        anchors: [n, 4].

    Returns:
        Boxes [pictures, n, 4], those of the default box itself where it is to find nothing; and classes
        [pictures, n], 0 where it is to find nothing, else the label plus 1.
    """
    places, classes = [], []
    for objects, kinds in zip(boxes, labels, strict=True):
        place = anchors.clone()
        kind = torch.zeros(len(anchors), dtype=torch.long, device=anchors.device)
        if len(objects):
            shared = overlap(objects, anchors)
            best, which = shared.max(dim=0)
            favourite = shared.argmax(dim=1)
            best[favourite] = 2.0
            # With equal favourites the last object wins, on every device: a loop over few objects.
            for number, anchor in enumerate(favourite.tolist()):
                which[anchor] = number
            wanted = best > ENOUGH
            place = torch.where(wanted[:, None], objects[which], place)
            kind = torch.where(wanted, kinds[which] + 1, kind)
        places.append(place)
        classes.append(kind)
    return torch.stack(places), torch.stack(classes)
