"""Boxes as tensors: overlap, matching, the differences that a network predicts, non-maximum suppression.

A box is (left, top, right, bottom) in pixels or as fractions of the picture; width is right minus left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hora.workloads.scenes.compiled import torchvision_ops

__all__ = ["areas", "clip", "decode", "encode", "flip", "overlap", "suppress", "suppress_classes"]

LARGEST_GROWTH = math.log(1000 / 16)
"""Predicted sizes are at most this factor (as a logarithm) those of their anchors, as in the reference."""


def areas(boxes: Tensor) -> Tensor:
    """Of boxes [..., 4], as [...]."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of each of ``first`` [..., n, 4] with each of ``second`` [..., m, 4].

    Returns:
        [..., n, m]; 0 where both boxes are empty.
    """
    one, other = first.unsqueeze(-2), second.unsqueeze(-3)
    corner = torch.minimum(one[..., 2:], other[..., 2:]) - torch.maximum(one[..., :2], other[..., :2])
    width, height = corner.clamp_(min=0).unbind(-1)
    shared = width * height
    union = areas(first).unsqueeze(-1) + areas(second).unsqueeze(-2) - shared
    return torch.where(union > 0, shared / union, 0.0)


def encode(boxes: Tensor, anchors: Tensor, weights: tuple[float, float, float, float]) -> Tensor:
    """What a network has to predict so that :func:`decode` makes the anchors into the boxes: [..., 4].

    R. Girshick et al., "Rich feature hierarchies", arXiv:1311.2524, appendix C: shifts of the centre in
    anchor widths and heights, and the logarithms of the growth, each times its weight. SSD divides by
    variances, which is the same: 1 / 0.1 and 1 / 0.2 are the weights 10 and 5.
    """
    (x, y, width, height), (ax, ay, awidth, aheight) = _centred(boxes), _centred(anchors)
    parts = ((x - ax) / awidth, (y - ay) / aheight, (width / awidth).log(), (height / aheight).log())
    return torch.stack(parts, dim=-1) * boxes.new_tensor(weights)


def decode(differences: Tensor, anchors: Tensor, weights: tuple[float, float, float, float]) -> Tensor:
    """The boxes that a network predicts, [..., 4]: what :func:`encode` undoes."""
    right, down, wider, higher = (differences / differences.new_tensor(weights)).unbind(-1)
    x, y, width, height = _centred(anchors)
    x, y = x + right * width, y + down * height
    width = width * wider.clamp(max=LARGEST_GROWTH).exp()
    height = height * higher.clamp(max=LARGEST_GROWTH).exp()
    return torch.stack((x - width / 2, y - height / 2, x + width / 2, y + height / 2), dim=-1)


def clip(boxes: Tensor, height: Tensor | float, width: Tensor | float) -> Tensor:
    """The parts inside the picture."""
    zero = boxes.new_zeros(())
    limits = [torch.as_tensor(edge, dtype=boxes.dtype, device=boxes.device) for edge in (width, height)]
    edges = [
        torch.minimum(torch.maximum(edge, zero), limits[index % 2])
        for index, edge in enumerate(boxes.unbind(-1))
    ]
    return torch.stack(edges, dim=-1)


def flip(boxes: Tensor, width: float) -> Tensor:
    """The boxes of the picture mirrored left to right."""
    left, top, right, bottom = boxes.unbind(-1)
    return torch.stack((width - right, top, width - left, bottom), dim=-1)


def suppress(boxes: Tensor, threshold: float) -> Tensor:
    """Greedy non-maximum suppression: which boxes to keep, bool [..., n].

    A box goes when it overlaps a better one that is kept by more than the threshold. All rows of a batch are
    decided together: a box is decided as soon as those before it that overlap it are, which takes as many
    rounds as the longest chain of boxes that suppress each other, rarely more than ten.

    Args:
        boxes: [..., n, 4], the best first. Empty boxes suppress nothing and are kept.
        threshold: of intersection over union.
    """
    count = boxes.shape[-2]
    # hides[..., i, j]: box i comes before j and overlaps it too much.
    later = torch.ones(count, count, dtype=torch.bool, device=boxes.device).triu(diagonal=1)
    hides = ((overlap(boxes, boxes) > threshold) & later).to(torch.float32)
    kept = torch.ones(boxes.shape[:-1], device=boxes.device)
    for _ in range(count):
        once = (torch.matmul(kept.unsqueeze(-2), hides).squeeze(-2) == 0).to(torch.float32)
        if torch.equal(once, kept):
            break
        kept = once
    return kept > 0


def suppress_classes(boxes: Tensor, scores: Tensor, classes: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression within each class: positions of the boxes to keep, the best first.

    Uses torchvision's ``batched_nms`` where torchvision is installed.

    Args:
        boxes: [n, 4].
        scores: [n].
        classes: [n]; boxes of different classes do not suppress each other.
        threshold: of intersection over union.
    """
    compiled = torchvision_ops()
    if compiled is not None:
        kept: Tensor = compiled.batched_nms(boxes, scores, classes, threshold)
        return kept
    order = scores.argsort(descending=True, stable=True)
    return order[suppress(apart(boxes, classes)[order], threshold)]


def apart(boxes: Tensor, classes: Tensor) -> Tensor:
    """The boxes, with those of each class moved to a place where no other class has any.

    Args:
        boxes: [..., n, 4].
        classes: [..., n], from 0.
    """
    reach = (boxes.amax() - boxes.amin()) + 1 if boxes.numel() else boxes.new_ones(())
    return boxes + (classes * reach).unsqueeze(-1)


def _centred(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    left, top, right, bottom = boxes.unbind(-1)
    return (left + right) / 2, (top + bottom) / 2, right - left, bottom - top
