"""Fingerprints of tensors: equal for equal bits, and cheap enough to take while a training runs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from hora.adapter.prints import BLOCKS, SAMPLE

__all__ = ["digests", "sample"]

LARGE = 8192
"""Bytes from which a tensor is folded first."""


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number per tensor: different for different bits, but for chance, and independent of the device.

    On a GPU it waits for the results.
    """
    found: list[int] = [0] * len(tensors)
    small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    large: dict[torch.device, list[tuple[int, torch.Tensor, torch.Tensor | None]]] = {}
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            if tensor.numel() * tensor.element_size() < LARGE and tensor.layout is torch.strided:
                small.setdefault((tensor.dtype, tensor.device), []).append(index)
            else:
                large.setdefault(tensor.device, []).append((index, *_folded(tensor)))
        for members in small.values():
            # One copy of many small tensors costs less than looking at each.
            joined = torch._C._nn.flatten_dense_tensors([tensors[index] for index in members])
            data, end = _bytes(joined), 0
            width = joined.element_size()
            for index in members:
                start, end = end, end + tensors[index].numel() * width
                found[index] = zlib.crc32(data[start:end])
        for folded in large.values():
            words = _bytes(torch.cat([head for _, head, _ in folded]))
            for place, (index, _, tail) in enumerate(folded):
                number = zlib.crc32(words[8 * BLOCKS * place : 8 * BLOCKS * (place + 1)])
                found[index] = number if tail is None else zlib.crc32(_bytes(tail), number)
    return found


def sample(tensor: torch.Tensor) -> int:
    """A number for what a model is fed: of a large tensor, some elements and the shape."""
    with torch.no_grad():
        flat = tensor.detach()
        if flat.numel() > SAMPLE:
            flat = flat.reshape(-1)[:: flat.numel() // SAMPLE]
        return zlib.crc32(str(tuple(tensor.shape)).encode(), digests([flat.clone()])[0])


def _bytes(row: torch.Tensor) -> memoryview:
    return row.cpu().view(torch.uint8).numpy().data


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as one row, without a copy where it has no gaps."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_contiguous():
        return tensor.view(-1)
    # In memory order: equal models have equal strides, and a copy would cost more than the rest.
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if dense.is_contiguous():
        return dense.view(-1)
    return tensor.contiguous().view(-1)


def _folded(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of a tensor's blocks of 64-bit words, and what is left over at its end."""
    flat = _flat(tensor)
    width = flat.element_size()
    size = flat.numel() * width
    if flat.storage_offset() * width % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    left = size % (8 * BLOCKS)
    head = flat[: (size - left) // width] if left else flat
    words = head.view(torch.int64).view(BLOCKS, (size - left) // (8 * BLOCKS))
    return words.sum(1), flat[(size - left) // width :] if left else None
