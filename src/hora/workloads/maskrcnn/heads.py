"""What is said of each region: its class, a better box, and a mask.

K. He et al., "Mask R-CNN", arXiv:1703.06870, with the heads for feature pyramids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hora.workloads.maskrcnn.config import ModelConfig
from hora.workloads.scenes.regions import align, levels

__all__ = ["BoxHead", "MaskHead", "box_losses", "mask_loss", "pool"]


class BoxHead(nn.Module):
    """Features of regions [n, channels, cells, cells] to logits [n, classes + 1] and differences.

    The differences are [n, classes + 1, 4], for each class its own. Output 0 is nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads = config.heads
        layers: list[nn.Module] = []
        for inputs in (config.channels * heads.box_cells**2, heads.hidden):
            layers.append(nn.Linear(inputs, heads.hidden))
            layers += [nn.LayerNorm(heads.hidden)] if heads.norm else []
            layers.append(nn.ReLU(inplace=True))
        self.hidden = nn.Sequential(*layers)
        self.logits = nn.Linear(heads.hidden, config.classes + 1)
        self.differences = nn.Linear(heads.hidden, 4 * (config.classes + 1))
        for module in self.hidden:
            if isinstance(module, nn.Linear):
                nn.init.kaiming_uniform_(module.weight, a=1)
                nn.init.zeros_(module.bias)
        for module, deviation in ((self.logits, 0.01), (self.differences, 0.001)):
            nn.init.normal_(module.weight, std=deviation)
            nn.init.zeros_(module.bias)

    def forward(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        """Features of regions to logits [n, classes + 1] and differences [n, classes + 1, 4]."""
        hidden = self.hidden(regions.flatten(1))
        logits = self.logits(hidden)
        return logits, self.differences(hidden).view(len(hidden), self.logits.out_features, 4)


class MaskHead(nn.Module):
    """Features of regions [n, channels, cells, cells] to mask logits [n, classes, 2 cells, 2 cells]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = config.channels
        for outer in config.heads.mask_channels:
            layers += [nn.Conv2d(channels, outer, 3, padding=1), nn.ReLU(inplace=True)]
            channels = outer
        layers += [nn.ConvTranspose2d(channels, channels, 2, stride=2), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(channels, config.classes, 1)]
        self.layers = nn.Sequential(*layers)
        for module in self.layers:
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, regions: Tensor) -> Tensor:
        """Features of regions to mask logits [n, classes, 2 cells, 2 cells]."""
        logits: Tensor = self.layers(regions)
        return logits


def pool(pyramid: Sequence[Tensor], boxes: Sequence[Tensor], *, cells: int, config: ModelConfig) -> Tensor:
    """The features of each region, from the level that fits its size: [regions, channels, cells, cells].

    Args:
        pyramid: features of each level, the finest first.
        boxes: of each picture, [regions, 4] in pixels.
        cells: along each side of the result.
        config: where the pyramid begins, and which sizes belong to which level.
    """
    heads, first = config.heads, config.first_level
    last = first + len(pyramid) - 1
    together = torch.cat(list(boxes))
    level = levels(together, first=first, last=last, canonical=heads.canonical, at=heads.canonical_level)
    each = torch.split(level, [len(regions) for regions in boxes])
    found = pyramid[0].new_zeros(len(together), pyramid[0].shape[1], cells, cells)
    for index, features in enumerate(pyramid):
        chosen = [regions[mine == first + index] for regions, mine in zip(boxes, each, strict=True)]
        rows = (level == first + index).nonzero().squeeze(1)
        if len(rows):
            scale = 1 / 2 ** (first + index)
            part = align(
                features,
                chosen,
                size=cells,
                scale=scale,
                sampling=heads.sampling,
                centred=heads.centred,
            )
            found = found.index_copy(0, rows, part)
    return found


def box_losses(
    logits: Tensor, differences: Tensor, kinds: Tensor, wanted: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses of classes and of boxes.

    Args:
        logits: [n, classes + 1].
        differences: [n, classes + 1, 4].
        kinds: int64, [n]: 0 is nothing, else the label plus 1.
        wanted: [n, 4]: the differences of the positive regions; those of others are not looked at.
        weights: [n], what each region counts for; over a picture they add up to one over the pictures.
    """
    class_loss = (F.cross_entropy(logits, kinds, reduction="none") * weights).sum()
    mine = differences[torch.arange(len(kinds), device=kinds.device), kinds]
    box_loss = F.smooth_l1_loss(mine, wanted, reduction="none").sum(dim=1)
    return class_loss, (box_loss * weights * (kinds > 0)).sum()


def mask_loss(logits: Tensor, labels: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Binary cross entropy of the mask of each region's own class, the mean over its cells.

    Args:
        logits: [n, classes, cells, cells].
        labels: int64, [n], from 0.
        wanted: [n, cells, cells], 0 or 1.
        weights: [n], what each region counts for.
    """
    mine = logits[torch.arange(len(labels), device=labels.device), labels]
    each = F.binary_cross_entropy_with_logits(mine, wanted.to(mine.dtype), reduction="none")
    return (each.mean(dim=(1, 2)) * weights).sum()
