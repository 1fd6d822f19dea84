"""Residual blocks that the small detectors and SSD's ResNet-34 are made of."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BasicBlock"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (K. He et al., arXiv:1512.03385)."""

    def __init__(self, channels: int, outer: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, outer, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outer, 1, stride=stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, features: Tensor) -> Tensor:
        """Features [n, channels, height, width] to features with the block's outer channels."""
        branch = F.relu(self.norm1(self.conv1(features)), inplace=True)
        return F.relu(self.norm2(self.conv2(branch)) + self.shortcut(features), inplace=True)
