"""Short numbers and names for tensors, so that two runs can be compared without keeping their tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hora.core.recording import SKETCH

__all__ = ["fingerprint", "first_tensor", "row_digests", "tensors"]

_WIDTH = 4096
_signs: dict[tuple[str, int], torch.Tensor] = {}


def fingerprint(tensor: torch.Tensor) -> list[float]:
    """``[norm, projections...]``: random projections in float64, the same for every tensor of this length.

    The signs are a product of one sign for the place inside a block of 4096 elements and one for the block
    (Alon, Matias, Szegedy 1999, applied to both indices), so that no large matrix of signs is needed.
    """
    flat = tensor.detach().reshape(-1).double()
    count = flat.numel()
    blocks = count // _WIDTH
    inner, outer = _sign("inner", _WIDTH, flat.device), _sign("outer", blocks + 1, flat.device)
    total = flat[blocks * _WIDTH :] @ inner[: count - blocks * _WIDTH] * outer[blocks]
    if blocks:
        total = total + (flat[: blocks * _WIDTH].view(blocks, _WIDTH) @ inner * outer[:blocks]).sum(0)
    numbers: list[float] = total.tolist()
    return [math.sqrt(float(flat @ flat)), *numbers]


def _sign(kind: str, count: int, device: torch.device) -> torch.Tensor:
    key = (kind, count if kind == "inner" else 1 << (count - 1).bit_length())
    if key not in _signs or _signs[key].device != device:
        generator = torch.Generator().manual_seed(1 if kind == "inner" else 2)
        # The generator's stream is read row by row, so a longer table begins as a shorter one does.
        bits = torch.randint(0, 2, (key[1], SKETCH), generator=generator)
        _signs[key] = (bits * 2 - 1).to(device, torch.float64)
    return _signs[key]


def row_digests(tensor: torch.Tensor) -> list[str]:
    """A digest per row of the first dimension."""
    if tensor.dim() == 0:
        return []
    plain = tensor.detach().contiguous().cpu()
    rows = len(plain)
    if plain.numel() == 0:
        return ["empty"] * rows
    table = plain.reshape(-1).view(torch.uint8).view(rows, -1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in table]


def first_tensor(tree: Any) -> torch.Tensor | None:
    """The first tensor with rows in a batch."""
    return next((tensor for tensor in tensors(tree) if tensor.dim()), None)


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors of a tree of mappings, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)
