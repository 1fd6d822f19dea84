"""ResNet v1.5: one definition for small images and for ImageNet.

K. He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385. In v1.5 the stride of a
down-sampling block sits on its 3x3 convolution instead of its first 1x1, as in the MLPerf reference.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hora.workloads.resnet.config import ModelConfig

__all__ = ["Bottleneck", "ResNet"]

EXPANSION = 4
"""Output channels of a bottleneck block over its inner channels."""


class ResNet(nn.Module):
    """Images [n, channels, height, width] to logits [n, classes].

    Convolutions start with He's normal initialization (fan-out), the classifier with N(0, 0.01).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.stem_width
        if config.stem == "imagenet":
            self.stem = nn.Sequential(
                _conv(config.channels, width, 7, stride=2, config=config),
                _norm(width, config),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        else:
            self.stem = nn.Sequential(
                _conv(config.channels, width, 3, stride=2, config=config),
                _norm(width, config),
                nn.ReLU(inplace=True),
            )
        blocks: list[nn.Module] = []
        for stage, (inner, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Bottleneck(width, inner, stride=stride, config=config))
                width = inner * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(width, config.classes)
        self._initialize()

    def forward(self, images: Tensor) -> Tensor:
        """Images [samples, channels, height, width] to logits [samples, classes]."""
        features = self.blocks(self.stem(images))
        return cast(Tensor, self.classifier(features.mean(dim=(2, 3))))

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)
        if self.config.zero_gamma:
            for block in self.blocks:
                last = cast(Bottleneck, block).norm3
                if isinstance(last, nn.BatchNorm2d):
                    nn.init.zeros_(last.weight)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 convolutions around a shortcut; ReLU after the addition."""

    def __init__(self, channels: int, inner: int, *, stride: int, config: ModelConfig) -> None:
        super().__init__()
        outer = inner * EXPANSION
        self.conv1 = _conv(channels, inner, 1, stride=1, config=config)
        self.norm1 = _norm(inner, config)
        self.conv2 = _conv(inner, inner, 3, stride=stride, config=config)
        self.norm2 = _norm(inner, config)
        self.conv3 = _conv(inner, outer, 1, stride=1, config=config)
        self.norm3 = _norm(outer, config)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(
                _conv(channels, outer, 1, stride=stride, config=config), _norm(outer, config)
            )

    def forward(self, features: Tensor) -> Tensor:
        """Features [samples, channels, height, width] to features with the block's outer channels."""
        branch = F.relu(self.norm1(self.conv1(features)), inplace=True)
        branch = F.relu(self.norm2(self.conv2(branch)), inplace=True)
        branch = self.norm3(self.conv3(branch))
        return F.relu(branch + self.shortcut(features), inplace=True)


def _conv(channels: int, outer: int, kernel: int, *, stride: int, config: ModelConfig) -> nn.Conv2d:
    # A normalization that follows takes any bias away.
    bias = config.norm == "none"
    return nn.Conv2d(channels, outer, kernel, stride=stride, padding=kernel // 2, bias=bias)


def _norm(channels: int, config: ModelConfig) -> nn.Module:
    return nn.BatchNorm2d(channels, eps=1e-5, momentum=0.1) if config.norm == "batch" else nn.Identity()


def parameters(model: nn.Module) -> int:
    """Number of trainable values."""
    return sum(parameter.numel() for parameter in model.parameters())


def channels_last(images: Tensor) -> Tensor:
    """[n, height, width, channels] in memory, seen as [n, channels, height, width]; nothing is copied."""
    return images.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
