"""Mask R-CNN: proposals from a pyramid of features, then class, box and mask of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hora.workloads.maskrcnn.backbone import Pyramid, make_backbone
from hora.workloads.maskrcnn.config import ModelConfig
from hora.workloads.maskrcnn.heads import BoxHead, MaskHead, box_losses, mask_loss, pool
from hora.workloads.maskrcnn.rpn import RPN, anchors_of
from hora.workloads.maskrcnn.sampling import chance, choose, match
from hora.workloads.scenes.boxes import clip, decode, encode, suppress_classes
from hora.workloads.scenes.regions import crop_masks

__all__ = ["Found", "MaskRCNN", "Objects"]

WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Of the differences that the box head predicts, as in the reference."""
CANDIDATES = 10
"""Best pairs of region and class that suppression chooses from, for each detection kept at most."""
FOR_ANCHORS, FOR_REGIONS = 0, 1


@dataclass(frozen=True, kw_only=True)
class Objects:
    """What there is in each picture of a batch.

    Attributes:
        boxes: of each picture, [m, 4] in pixels.
        labels: of each, int64 [m], from 0.
        masks: of each, uint8 [m, height, width].
    """

    boxes: Sequence[Tensor]
    labels: Sequence[Tensor]
    masks: Sequence[Tensor]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found in one picture, the best first.

    Attributes:
        boxes: [k, 4] in pixels.
        labels: int64 [k], from 0.
        scores: [k].
        masks: [k, cells, cells], probabilities inside of each box.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    masks: Tensor


class MaskRCNN(nn.Module):
    """Pictures [n, 3, height, width], sides multiples of the largest stride, to losses or detections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = make_backbone(config)
        self.pyramid = Pyramid(self.backbone.channels, config.channels, norm=config.norm)
        self.rpn = RPN(config.rpn, config.channels)
        self.box_head = BoxHead(config)
        self.mask_head = MaskHead(config)

    def forward(
        self, pictures: Tensor, sizes: Tensor, objects: Objects, numbers: Tensor, *, seed: int, epoch: int
    ) -> Mapping[str, Tensor]:
        """The five losses, each a mean over pictures: ``object``, ``place``, ``class``, ``box``, ``mask``.

        Args:
            pictures: normalized, [n, 3, height, width].
            sizes: int64, [n, 2], height and width of each without padding.
            objects: what there is to find.
            numbers: int64, [n], of the pictures in their data set: with seed and epoch they decide which
                anchors and regions are learned from.
            seed: of the run.
            epoch: from 0.
        """
        levels, proposing = self.features(pictures)
        anchors = anchors_of(self.config.rpn, proposing, first_level=self.config.first_level)
        logits, differences = self.rpn(proposing)
        total = sum(len(level) for level in anchors)
        chances = chance(numbers, total, seed=2 * seed + FOR_ANCHORS, epoch=epoch)
        object_loss, place_loss = self.rpn.loss(
            logits, differences, anchors, objects.boxes, sizes=sizes, chances=chances
        )
        proposals, there = self.rpn.propose(logits, differences, anchors, sizes)
        most = proposals.shape[1] + max(len(boxes) for boxes in objects.boxes)
        chances = chance(numbers, most, seed=2 * seed + FOR_REGIONS, epoch=epoch)
        chosen = self._choose(proposals, there, objects, chances)
        class_loss, box_loss = self._box_losses(levels, chosen)
        return {
            "object": object_loss,
            "place": place_loss,
            "class": class_loss,
            "box": box_loss,
            "mask": self._mask_loss(levels, chosen, objects),
        }

    @torch.no_grad()
    def detect(self, pictures: Tensor, sizes: Tensor) -> list[Found]:
        """What there is in each picture; in evaluation mode.

        Args:
            pictures: normalized, [n, 3, height, width].
            sizes: int64, [n, 2], height and width of each without padding.
        """
        levels, proposing = self.features(pictures)
        anchors = anchors_of(self.config.rpn, proposing, first_level=self.config.first_level)
        logits, differences = self.rpn(proposing)
        proposals, there = self.rpn.propose(logits, differences, anchors, sizes)
        regions = [boxes[mask] for boxes, mask in zip(proposals, there, strict=True)]
        counts = [len(boxes) for boxes in regions]
        said, changes = self.box_head(
            pool(levels, regions, cells=self.config.heads.box_cells, config=self.config)
        )
        scores = said.softmax(dim=1)[:, 1:]
        found = [
            self._best(*parts)
            for parts in zip(
                regions, torch.split(scores, counts), torch.split(changes[:, 1:], counts), sizes, strict=True
            )
        ]
        boxes = [each for each, _, _ in found]
        masks = self.mask_head(pool(levels, boxes, cells=self.config.heads.mask_cells, config=self.config))
        labels = torch.cat([label for _, label, _ in found])
        mine = masks[torch.arange(len(labels), device=labels.device), labels].sigmoid()
        return [
            Found(boxes=box, labels=label, scores=score, masks=mask)
            for (box, label, score), mask in zip(
                found, mine.split([len(each) for each in boxes]), strict=True
            )
        ]

    def features(self, pictures: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The levels that regions are pooled from, and those that proposals come from."""
        levels = self.pyramid(self.backbone(pictures))
        more = [F.max_pool2d(levels[-1], 1, stride=2)] if self.config.pooled_level else []
        return levels, levels + more

    def _choose(self, proposals: Tensor, there: Tensor, objects: Objects, chances: Tensor) -> list[_Chosen]:
        """The regions learned from in each picture; the objects' own boxes are among the proposals."""
        heads = self.config.heads
        chosen = []
        for boxes, mask, known, labels, luck in zip(
            proposals, there, objects.boxes, objects.labels, chances, strict=True
        ):
            candidates = torch.cat((known, boxes[mask]))
            # The objects first: their luck does not depend on how many proposals there are.
            which, kind = match(
                candidates, known, positive=heads.positive, negative=heads.positive, best_too=False
            )
            positive, negative = choose(
                kind[None],
                luck[None, : len(candidates)],
                number=heads.sampled,
                positive_part=heads.positive_part,
            )
            rows = torch.cat([part[0].nonzero().squeeze(1) for part in (positive, negative)])
            count = int(positive.sum())
            regions, which = candidates[rows], which[rows]
            kinds = torch.zeros(len(rows), dtype=torch.long, device=boxes.device)
            wanted = torch.zeros_like(regions)
            if count:
                kinds[:count] = labels[which[:count]] + 1
                wanted[:count] = encode(known[which[:count]], regions[:count], WEIGHTS)
            chosen.append(_Chosen(regions, which[:count], kinds, wanted, count))
        return chosen

    def _box_losses(self, levels: Sequence[Tensor], chosen: Sequence[_Chosen]) -> tuple[Tensor, Tensor]:
        regions = [each.regions for each in chosen]
        logits, differences = self.box_head(
            pool(levels, regions, cells=self.config.heads.box_cells, config=self.config)
        )
        weights = _shares([len(each.regions) for each in chosen], logits)
        kinds, wanted = (torch.cat([getattr(each, part) for each in chosen]) for part in ("kinds", "wanted"))
        return box_losses(logits, differences, kinds, wanted, weights)

    def _mask_loss(self, levels: Sequence[Tensor], chosen: Sequence[_Chosen], objects: Objects) -> Tensor:
        cells = self.config.heads.mask_cells
        positive = [each.regions[: each.positive] for each in chosen]
        logits = self.mask_head(pool(levels, positive, cells=cells, config=self.config))
        wanted = torch.cat(
            [
                crop_masks(masks, each.which, boxes, size=2 * cells)
                for masks, each, boxes in zip(objects.masks, chosen, positive, strict=True)
            ]
        )
        labels = torch.cat([each.kinds[: each.positive] for each in chosen]) - 1
        return mask_loss(logits, labels, wanted, _shares([len(boxes) for boxes in positive], logits))

    def _best(
        self, regions: Tensor, scores: Tensor, differences: Tensor, size: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Boxes, labels and scores of the detections in one picture."""
        heads = self.config.heads
        kinds = scores.shape[1]
        most = min(CANDIDATES * heads.detections, scores.numel())
        best, which = scores.flatten().topk(most)
        best, which = best[best > heads.least_score], which[best > heads.least_score]
        rows, labels = which // kinds, which % kinds
        boxes = decode(differences[rows, labels], regions[rows], WEIGHTS)
        boxes = clip(boxes, size[0].to(boxes.dtype), size[1].to(boxes.dtype))
        kept = suppress_classes(boxes, best, labels, heads.suppression)[: heads.detections]
        return boxes[kept], labels[kept], best[kept]


@dataclass(frozen=True)
class _Chosen:
    """The regions learned from in one picture, the positive ones first.

    Attributes:
        regions: [n, 4].
        which: the object of each positive one.
        kinds: int64 [n], 0 is nothing, else the label plus 1.
        wanted: [n, 4], differences, 0 where nothing is wanted.
        positive: how many are.
    """

    regions: Tensor
    which: Tensor
    kinds: Tensor
    wanted: Tensor
    positive: int


def _shares(counts: Sequence[int], like: Tensor) -> Tensor:
    """What each region counts for, so that every picture that has some counts the same."""
    each = [like.new_full((count,), 1 / (max(count, 1) * len(counts))) for count in counts]
    return torch.cat(each)
