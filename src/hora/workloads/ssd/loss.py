"""SSD's loss, and detections from its outputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hora.workloads.scenes.boxes import apart, clip, decode, encode, suppress
from hora.workloads.ssd.anchors import WEIGHTS

__all__ = ["detections", "loss"]

LEAST_SCORE = 0.05
"""Probability below which nothing is a detection, as in the reference."""
CANDIDATES = 5
"""Best pairs of box and class that suppression chooses from, for each detection that is kept at most."""


def loss(
    places: Tensor, logits: Tensor, boxes: Tensor, classes: Tensor, *, anchors: Tensor, negatives: int
) -> Tensor:
    """The mean over pictures of (smooth L1 of places + cross entropy of classes) per matched default box.

    W. Liu et al., arXiv:1512.02325, equation 1 and "hard negative mining": places count where an object was
    matched, classes there and, for each such box, at ``negatives`` boxes without an object, those that the
    network is most wrong about. A picture without objects counts 0. Each picture is normalized by itself, so
    the mean over a global batch does not depend on the number of workers.

    Args:
        places: [pictures, n, 4], what the network says.
        logits: [pictures, n, classes + 1].
        boxes: [pictures, n, 4], what each default box is to find, from ``anchors.match``.
        classes: [pictures, n], likewise; 0 is nothing.
        anchors: [n, 4].
        negatives: 3 in the paper.
    """
    matched = classes > 0
    count = matched.sum(dim=1)
    wanted = encode(boxes, anchors, WEIGHTS)
    place = F.smooth_l1_loss(places, wanted, reduction="none").sum(dim=2)
    place = (place * matched).sum(dim=1)
    each = F.cross_entropy(logits.transpose(1, 2), classes, reduction="none")
    wrong = each.detach().masked_fill(matched, 0.0)
    most = (negatives * count).clamp(max=wrong.shape[1])
    # Rank of each box among those that the network is most wrong about.
    rank = wrong.argsort(dim=1, descending=True, stable=True).argsort(dim=1, stable=True)
    chosen = matched | (rank < most[:, None])
    kind = (each * chosen).sum(dim=1)
    per_picture = (place + kind) / count.clamp(min=1)
    return (per_picture * (count > 0)).mean()


@torch.no_grad()
def detections(
    places: Tensor, logits: Tensor, *, anchors: Tensor, suppression: float, most: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each picture: boxes [k, 4] in fractions, labels [k] from 0, and scores [k], the best first.

    Args:
        places: [pictures, n, 4].
        logits: [pictures, n, classes + 1].
        anchors: [n, 4].
        suppression: overlap from which the lesser of two detections of a class goes.
        most: detections in a picture.
    """
    scores = logits.softmax(dim=2)[..., 1:]
    kinds = scores.shape[2]
    best, which = scores.flatten(1).topk(min(CANDIDATES * most, scores[0].numel()), dim=1)
    rows, labels = which // kinds, which % kinds
    found = clip(decode(places, anchors, WEIGHTS), 1.0, 1.0)
    found = found.gather(1, rows.unsqueeze(2).expand(-1, -1, 4))
    kept = suppress(apart(found, labels), suppression) & (best > LEAST_SCORE)
    return [
        (boxes[keep][:most], label[keep][:most], score[keep][:most])
        for boxes, label, score, keep in zip(found, labels, best, kept, strict=True)
    ]
