"""SSD: a backbone, ever smaller maps behind it, and on each map a place and a class for each default box."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hora.workloads.scenes.blocks import BasicBlock
from hora.workloads.ssd.config import ModelConfig

__all__ = ["SSD", "resnet34"]


class SSD(nn.Module):
    """Pictures [n, 3, side, side] to places [n, boxes, 4] and logits [n, boxes, classes + 1].

    Output 0 of the classes is nothing. The boxes' order is that of ``anchors.default_boxes``. The backbone
    starts with He's normal initialization, what follows with Xavier's uniform one, as in the reference.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = resnet34() if config.backbone == "resnet34" else _small(config)
        self.further = nn.ModuleList(_further(config))
        outputs = 4 + config.classes + 1
        self.heads = nn.ModuleList(
            nn.Conv2d(channels, count * outputs, 3, padding=1)
            for channels, count in zip(config.outputs, config.per_cell, strict=True)
        )
        for module in self.backbone.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in itertools.chain(self.further.modules(), self.heads.modules()):
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Normalized pictures to places [n, boxes, 4] and logits [n, boxes, classes + 1]."""
        features = self.backbone(pictures)
        predicted = []
        for index, head in enumerate(self.heads):
            if index:
                features = self.further[index - 1](features)
            # One convolution gives places and classes: [n, cells, boxes per cell, 4 + classes + 1].
            outputs = head(features).permute(0, 2, 3, 1)
            predicted.append(outputs.reshape(len(pictures), -1, 4 + self.config.classes + 1))
        places, logits = torch.split(torch.cat(predicted, dim=1), [4, self.config.classes + 1], dim=2)
        return places, logits


def resnet34() -> nn.Sequential:
    """ResNet-34 up to conv4, whose first block keeps the size: [n, 3, 300, 300] to [n, 256, 38, 38]."""
    stem = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    return nn.Sequential(*stem, *_stages(64, ((64, 3, 1), (128, 4, 2), (256, 6, 1))))


def _small(config: ModelConfig) -> nn.Sequential:
    """Stride 8, with the sizes of ``config.widths``: a stem and two stages."""
    first, second, third = config.widths
    stem = [
        nn.Conv2d(3, first, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(first),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*stem, *_stages(first, ((second, 1, 2), (third, 2, 2))))


def _stages(channels: int, stages: tuple[tuple[int, int, int], ...]) -> Iterator[nn.Module]:
    for outer, depth, stride in stages:
        for index in range(depth):
            yield BasicBlock(channels, outer, stride=stride if index == 0 else 1)
            channels = outer


def _further(config: ModelConfig) -> Iterator[nn.Module]:
    """What makes each map from the one before: 1x1 convolution, then 3x3 convolution."""
    halving = len(config.inner) - config.valid
    for index, inner in enumerate(config.inner):
        stride, padding = (2, 1) if index < halving else (1, 0)
        yield nn.Sequential(
            *_conv(config.outputs[index], inner, 1, norm=config.norm),
            *_conv(inner, config.outputs[index + 1], 3, stride=stride, padding=padding, norm=config.norm),
        )


def _conv(
    channels: int, outer: int, kernel: int, *, stride: int = 1, padding: int = 0, norm: bool
) -> list[nn.Module]:
    conv = nn.Conv2d(channels, outer, kernel, stride=stride, padding=padding, bias=not norm)
    return [conv, nn.BatchNorm2d(outer), nn.ReLU(inplace=True)] if norm else [conv, nn.ReLU(inplace=True)]
