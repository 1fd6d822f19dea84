"""Features of several sizes: a residual network, and a pyramid from its stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hora.workloads.maskrcnn.config import ModelConfig
from hora.workloads.scenes.blocks import BasicBlock

__all__ = ["FrozenBatchNorm", "Pyramid", "Stages", "make_backbone"]


class FrozenBatchNorm(nn.Module):
    """Batch normalization whose statistics, scale and shift stay as they were loaded: all are buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, features: Tensor) -> Tensor:
        """Features [n, channels, height, width], scaled and shifted."""
        weight, bias = self.get_buffer("weight"), self.get_buffer("bias")
        scale = weight * (self.get_buffer("running_var") + 1e-5).rsqrt()
        shift = bias - self.get_buffer("running_mean") * scale
        return features * scale[:, None, None] + shift[:, None, None]


class Stages(nn.Module):
    """A stem and stages, each of half the size of the one before; gives the output of every stage.

    Attributes:
        channels: of each output.
    """

    def __init__(self, stem: nn.Module, stages: Sequence[nn.Module], channels: Sequence[int]) -> None:
        super().__init__()
        self.stem = stem
        self.stages = nn.ModuleList(stages)
        self.channels = tuple(channels)

    def forward(self, pictures: Tensor) -> list[Tensor]:
        """Pictures [n, 3, height, width] to features of the strides 4, 8, ..."""
        features = self.stem(pictures)
        found = []
        for stage in self.stages:
            features = stage(features)
            found.append(features)
        return found


class Pyramid(nn.Module):
    """T.-Y. Lin et al., "Feature Pyramid Networks", arXiv:1612.03144: coarse features added to fine ones."""

    def __init__(self, inputs: Sequence[int], channels: int, *, norm: bool) -> None:
        super().__init__()
        self.across = nn.ModuleList(_conv(count, channels, 1, norm=norm) for count in inputs)
        self.smooth = nn.ModuleList(_conv(channels, channels, 3, norm=norm) for _ in inputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, stages: Sequence[Tensor]) -> list[Tensor]:
        """Features of each stage to as many levels, all with the same channels, the finest first."""
        levels: list[Tensor] = []
        above: Tensor | None = None
        for index in reversed(range(len(stages))):
            here = self.across[index](stages[index])
            if above is not None:
                here = here + F.interpolate(above, size=here.shape[-2:], mode="nearest")
            above = here
            levels.append(self.smooth[index](here))
        return levels[::-1]


def _conv(channels: int, outer: int, kernel: int, *, norm: bool) -> nn.Module:
    conv = nn.Conv2d(channels, outer, kernel, padding=kernel // 2, bias=not norm)
    return nn.Sequential(conv, nn.BatchNorm2d(outer)) if norm else conv


def make_backbone(config: ModelConfig) -> Stages:
    """The backbone that the configuration names, with He's normal initialization.

    The weights of ``resnet50`` are to be loaded over it: its stem and first stage do not learn.
    """
    stages = _small(config) if config.backbone == "small" else _resnet50()
    for module in stages.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if config.backbone == "resnet50":
        for module in (stages.stem, stages.stages[0]):
            module.requires_grad_(False)
    return stages


class _Bottleneck(nn.Module):
    """Of ResNet v1.5, whose stride sits on the 3x3 convolution: torchvision's weights are of this one."""

    def __init__(self, channels: int, inner: int, *, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.norm1 = FrozenBatchNorm(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.norm2 = FrozenBatchNorm(inner)
        self.conv3 = nn.Conv2d(inner, outer, 1, bias=False)
        self.norm3 = FrozenBatchNorm(outer)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, outer, 1, stride=stride, bias=False), FrozenBatchNorm(outer)
            )

    def forward(self, features: Tensor) -> Tensor:
        branch = F.relu(self.norm1(self.conv1(features)))
        branch = F.relu(self.norm2(self.conv2(branch)))
        return F.relu(self.norm3(self.conv3(branch)) + self.shortcut(features))


def _resnet50() -> Stages:
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        FrozenBatchNorm(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    stages, channels = [], 64
    for stage, (inner, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        blocks = []
        for index in range(depth):
            blocks.append(_Bottleneck(channels, inner, stride=2 if stage and not index else 1))
            channels = 4 * inner
        stages.append(nn.Sequential(*blocks))
    return Stages(stem, stages, (256, 512, 1024, 2048))


def _small(config: ModelConfig) -> Stages:
    first, *others = config.widths
    stem = nn.Sequential(
        nn.Conv2d(3, first, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True)
    )
    stages, channels = [], first
    for outer in others:
        stages.append(BasicBlock(channels, outer, stride=2))
        channels = outer
    return Stages(stem, stages, others)
