"""Fingerprints of tensors: equal for equal bits, and cheap enough to take while a training runs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from hashlib import blake2b

import torch

__all__ = ["combined", "digests", "sample"]

BLOCKS = 64
"""Blocks of a large tensor, each of which is folded to the sum of its 64-bit words. That runs at the speed of
memory, where a checksum of all bytes takes about ten times as long."""

LARGE = 32768
"""Bytes from which a tensor is folded first."""

SAMPLE = 4096
"""Elements of a large input that are looked at."""


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One number per tensor: different for different bits, but for chance, and independent of the device.

    On a GPU it waits for the results.
    """
    found: list[int] = [0] * len(tensors)
    together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            if tensor.numel() * tensor.element_size() < LARGE and tensor.layout == torch.strided:
                together.setdefault((tensor.dtype, tensor.device), []).append(index)
            else:
                words = _folded(_flat(tensor))
                found[index] = zlib.crc32(_bytes(words))
        for members in together.values():
            # One copy of many small tensors costs less than looking at each.
            joined = torch._C._nn.flatten_dense_tensors([tensors[index].detach() for index in members])
            data, end = _bytes(joined), 0
            width = joined.element_size()
            for index in members:
                start, end = end, end + tensors[index].numel() * width
                found[index] = zlib.crc32(data[start:end])
    return found


def combined(numbers: Sequence[int]) -> str:
    """One word for a list of numbers."""
    text = ",".join(map(str, numbers))
    return blake2b(text.encode(), digest_size=8).hexdigest()


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
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_contiguous():
        return tensor.view(-1)
    # In memory order: equal models have equal strides, and a copy would cost more than the rest.
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if dense.is_contiguous():
        return dense.view(-1)
    return tensor.contiguous().view(-1)


def _folded(flat: torch.Tensor) -> torch.Tensor:
    size = flat.numel() * flat.element_size()
    if flat.data_ptr() % 8:
        flat = flat.clone()
    whole = size // (BLOCKS * 8) * BLOCKS * 8 // flat.element_size()
    head = flat[:whole].view(torch.int64).view(BLOCKS, -1).sum(1)
    tail = flat[whole:]
    return head if not tail.numel() else torch.cat([head.view(torch.uint8), tail.view(torch.uint8)])
