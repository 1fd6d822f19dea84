from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from hora.workloads.resnet.config import RESNET50, SMALL
from hora.workloads.resnet.model import Bottleneck, ResNet, parameters

torch.set_num_threads(1)


def bottleneck_parameters(channels: int, inner: int, *, projected: bool) -> int:
    """Convolutions without bias, two numbers per channel for each normalization."""
    outer = 4 * inner
    body = channels * inner + 9 * inner * inner + inner * outer + 2 * (inner + inner + outer)
    return body + (channels * outer + 2 * outer if projected else 0)


def expected_parameters(
    kernel: int, channels: int, stem: int, classes: int, stages: tuple[tuple[int, int], ...]
) -> int:
    total = channels * stem * kernel * kernel + 2 * stem
    width = stem
    for inner, depth in stages:
        for index in range(depth):
            total += bottleneck_parameters(width, inner, projected=index == 0)
            width = 4 * inner
    return total + width * classes + classes


def test_resnet50_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = ResNet(RESNET50)
    assert parameters(model) == 25_557_032
    assert expected_parameters(7, 3, 64, 1000, ((64, 3), (128, 4), (256, 6), (512, 3))) == 25_557_032


def test_the_small_net() -> None:
    model = ResNet(SMALL)
    assert parameters(model) == expected_parameters(3, 1, 16, 10, ((16, 2), (32, 2), (64, 2))) == 220_090
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_shapes_of_resnet50_on_224_pixels() -> None:
    with torch.device("meta"):
        model = ResNet(RESNET50)
        features = model.stem(torch.zeros(2, 3, 224, 224))
        assert features.shape == (2, 64, 56, 56)
        sides = []
        for block in model.blocks:
            features = block(features)
            sides.append((features.shape[1], features.shape[2]))
        assert sides == [(256, 56)] * 3 + [(512, 28)] * 4 + [(1024, 14)] * 6 + [(2048, 7)] * 3
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)


def test_the_stride_sits_on_the_3x3() -> None:
    with torch.device("meta"):
        model = ResNet(RESNET50)
    strided = 0
    for block in model.blocks:
        assert isinstance(block, Bottleneck)
        assert block.conv1.stride == block.conv3.stride == (1, 1)
        assert block.conv2.kernel_size == (3, 3)
        if block.conv2.stride == (2, 2):
            strided += 1
            assert isinstance(block.shortcut, nn.Sequential)
            assert isinstance(block.shortcut[0], nn.Conv2d)
            assert block.shortcut[0].stride == (2, 2)
    assert strided == 3


def test_initialization_is_he_normal_over_the_outputs() -> None:
    torch.manual_seed(0)
    model = ResNet(dataclasses.replace(SMALL, zero_gamma=True))
    conv = model.blocks[5].conv2  # 64 x 64 x 3 x 3
    assert conv.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.02)
    assert all(not block.norm3.weight.detach().any() for block in model.blocks)
    # Each block is then its shortcut: what enters an unprojected one leaves it.
    block = model.blocks[1]
    features = torch.rand(2, 64, 14, 14)
    assert torch.equal(block(features), features)


def test_without_normalization_there_are_biases_and_no_buffers() -> None:
    model = ResNet(dataclasses.replace(SMALL, norm="none"))
    assert not list(model.buffers())
    assert all(module.bias is not None for module in model.modules() if isinstance(module, nn.Conv2d))


def test_one_real_step_of_resnet50_on_224_pixels() -> None:
    torch.manual_seed(0)
    model = ResNet(RESNET50).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.functional.cross_entropy(model(torch.randn(2, 3, 224, 224)), torch.tensor([1, 999]))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert torch.isfinite(loss)
