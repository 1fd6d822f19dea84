"""Fingerprints of tensors: equal for equal bits, different for other bits, whatever the memory looks like."""

from __future__ import annotations

import pytest
import torch

from hora.torch.watch._digest import BLOCKS, LARGE, digests

BLOCK = 8 * BLOCKS  # bytes of a large tensor that are folded evenly
SIZES = [1, 7, LARGE // 8, LARGE + 8, LARGE + 12, 8 * BLOCK * 5, 8 * BLOCK * 5 + 1]


def different(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return digests([tensor]) != digests([other])


def words(size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(256, (size * width,), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64])
def test_any_element_counts(size: int, dtype: torch.dtype) -> None:
    tensor = words(size, dtype)
    assert not different(tensor, tensor.clone())
    for place in {0, size // 2, size - 1}:
        other = tensor.clone()
        other[place : place + 1].view(torch.uint8)[0] ^= 1
        assert different(tensor, other)


@pytest.mark.parametrize("size", SIZES)
def test_neither_its_neighbours_nor_its_place_in_memory_count(size: int) -> None:
    tensor = words(size, torch.float32)
    moved = torch.cat([torch.ones(1), tensor, torch.ones(1)])[1 : 1 + size]  # not at a multiple of 8 bytes
    assert not different(tensor, moved)
    neighbours = [torch.ones(3), words(LARGE, torch.float32), torch.nn.Parameter(tensor), torch.zeros(2)]
    assert digests(neighbours)[2] == digests([tensor])[0]


def test_a_permuted_tensor_counts_in_the_order_of_its_memory() -> None:
    images = words(8 * 16 * 12 * 12, torch.float32).view(8, 16, 12, 12)
    turned = images.contiguous(memory_format=torch.channels_last)
    assert not different(turned, turned.clone())
    assert digests([turned]) == digests([turned.permute(0, 2, 3, 1)])
    changed = turned.clone()
    changed[3, 2, 1, 0] = 0
    assert different(turned, changed)
    gaps = words(2 * LARGE, torch.float32).view(-1, 2)[:, 0]
    assert not different(gaps, gaps.contiguous())
