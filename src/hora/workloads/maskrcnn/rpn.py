"""The region proposal network: where there may be an object, whatever it is.

S. Ren et al., "Faster R-CNN", arXiv:1506.01497, on every level of a feature pyramid (arXiv:1612.03144).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hora.workloads.maskrcnn.config import RPNConfig
from hora.workloads.maskrcnn.sampling import choose, match
from hora.workloads.scenes.boxes import clip, decode, encode, suppress

__all__ = ["RPN", "anchors_of"]

WEIGHTS = (1.0, 1.0, 1.0, 1.0)
BETA = 1 / 9
"""Where the smooth L1 loss goes from squares to lines, as in the reference."""


class RPN(nn.Module):
    """Objectness and a better box for each anchor; the same weights on every level.

    Starts with N(0, 0.01), as in the reference.
    """

    def __init__(self, config: RPNConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        count = len(config.ratios)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.objectness = nn.Conv2d(channels, count, 1)
        self.differences = nn.Conv2d(channels, 4 * count, 1)
        for module in (self.conv, self.objectness, self.differences):
            nn.init.normal_(module.weight, std=0.01)
            assert module.bias is not None
            nn.init.zeros_(module.bias)

    def forward(self, levels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """For each level: logits [n, anchors] and differences [n, anchors, 4]."""
        logits, differences = [], []
        for features in levels:
            hidden = F.relu(self.conv(features))
            logits.append(self.objectness(hidden).permute(0, 2, 3, 1).flatten(1))
            differences.append(self.differences(hidden).permute(0, 2, 3, 1).reshape(len(features), -1, 4))
        return logits, differences

    @torch.no_grad()
    def propose(
        self,
        logits: Sequence[Tensor],
        differences: Sequence[Tensor],
        anchors: Sequence[Tensor],
        sizes: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The best places: boxes [n, k, 4] and which of them there are, bool [n, k], the best first.

        Args:
            logits: from :meth:`forward`.
            differences: likewise.
            anchors: of each level, from :func:`anchors_of`.
            sizes: [n, 2], height and width of the pictures.
        """
        before, after = (pair[0 if self.training else 1] for pair in (self.config.before, self.config.after))
        height, width = (sizes[:, side, None].to(logits[0].dtype) for side in (0, 1))
        all_boxes, all_scores = [], []
        for scores, changes, places in zip(logits, differences, anchors, strict=True):
            best, rows = scores.topk(min(before, scores.shape[1]), dim=1)
            chosen = changes.gather(1, rows.unsqueeze(2).expand(-1, -1, 4))
            boxes = clip(decode(chosen, places[rows], WEIGHTS), height, width)
            some = (boxes[..., 2] > boxes[..., 0]) & (boxes[..., 3] > boxes[..., 1])
            kept = suppress(boxes, self.config.suppression) & some
            all_boxes.append(boxes)
            all_scores.append(best.masked_fill(~kept, -math.inf))
        scores, boxes = torch.cat(all_scores, dim=1), torch.cat(all_boxes, dim=1)
        best, rows = scores.topk(min(after, scores.shape[1]), dim=1)
        return boxes.gather(1, rows.unsqueeze(2).expand(-1, -1, 4)), best > -math.inf

    def loss(
        self,
        logits: Sequence[Tensor],
        differences: Sequence[Tensor],
        anchors: Sequence[Tensor],
        objects: Sequence[Tensor],
        *,
        sizes: Tensor,
        chances: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Losses of objectness and of boxes, each the mean over the pictures.

        Each picture's losses are divided by its own number of sampled anchors, so that the mean over a global
        batch does not depend on the number of workers.

        Args:
            logits: from :meth:`forward`.
            differences: likewise.
            anchors: of each level.
            objects: boxes of each picture, [m, 4].
            sizes: [n, 2], height and width of the pictures. Anchors that reach out are not learned from.
            chances: [n, anchors], from ``sampling.chance``.
        """
        places = torch.cat(list(anchors))
        matched = [
            match(places, boxes, positive=self.config.positive, negative=self.config.negative, best_too=True)
            for boxes in objects
        ]
        kind = torch.stack([kinds for _, kinds in matched])
        kind = kind.masked_fill(~_inside(places, sizes), -1)
        positive, negative = choose(kind, chances, number=self.config.sampled, positive_part=0.5)
        sampled = positive | negative
        count = sampled.sum(dim=1).clamp(min=1)
        said = torch.cat(list(logits), dim=1)
        object_loss = F.binary_cross_entropy_with_logits(said, positive.to(said.dtype), reduction="none")
        object_loss = ((object_loss * sampled).sum(dim=1) / count).mean()
        rows, columns = positive.nonzero(as_tuple=True)
        wanted = [
            encode(boxes[which[mask]], places[mask], WEIGHTS)
            for boxes, (which, _), mask in zip(objects, matched, positive, strict=True)
        ]
        change = torch.cat(list(differences), dim=1)[rows, columns]
        box_loss = F.smooth_l1_loss(change, torch.cat(wanted), beta=BETA, reduction="none").sum(dim=1)
        return object_loss, (box_loss / count[rows]).sum() / len(said)


def anchors_of(config: RPNConfig, levels: Sequence[Tensor], *, first_level: int) -> list[Tensor]:
    """The anchors of each level, [cells * ratios, 4] in pixels, around the centres of the cells.

    Args:
        config: sizes and ratios.
        levels: features [n, channels, height, width].
        first_level: of the first of them; level k has stride 2^k.
    """
    found = []
    for index, (features, size) in enumerate(zip(levels, config.sizes, strict=True)):
        stride = 2 ** (first_level + index)
        shapes = [(size * math.sqrt(1 / ratio) / 2, size * math.sqrt(ratio) / 2) for ratio in config.ratios]
        half = torch.tensor(shapes, dtype=features.dtype, device=features.device)
        y, x = (
            (torch.arange(cells, dtype=features.dtype, device=features.device) + 0.5) * stride
            for cells in features.shape[-2:]
        )
        centre = torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flip(-1).reshape(-1, 1, 2)
        found.append(torch.cat((centre - half, centre + half), dim=2).reshape(-1, 4))
    return found


def _inside(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Which anchors lie inside of which picture, bool [n, anchors]."""
    height, width = sizes[:, 0, None], sizes[:, 1, None]
    return (boxes[:, :2] >= 0).all(dim=1) & (boxes[:, 2] <= width) & (boxes[:, 3] <= height)
