"""What a collective cannot take is refused before it begins: afterwards the other ranks would wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.core.errors import CollectiveError
from hora.torch.engines._vectors import is_plain

__all__ = ["check_kind", "check_lists", "check_rows", "check_whole", "check_writable"]

Tensors = Sequence[torch.Tensor]


def check_writable(tensors: Tensors) -> None:
    """Each element has a place of its own."""
    for tensor in tensors:
        # 1 stands for "yes"; what torch cannot tell quickly it finds out when it writes.
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            raise CollectiveError(
                f"A tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be written: "
                "several of its elements share one place in memory.",
                fix="Write tensor.contiguous(), or clone() what expand() returned.",
            )


def check_lists(name: str, tensors: Tensors, one: torch.Tensor, size: int) -> None:
    """``tensors`` has a tensor for each rank, all as long as ``one`` and of its dtype."""
    check_kind(name, tensors, one, size)
    for rank, tensor in enumerate(tensors):
        if tensor.numel() != one.numel():
            raise CollectiveError(
                f"{name} takes equal parts, but the tensor for rank {rank} has {tensor.numel()} elements and "
                f"this rank's own {one.numel()}.",
                fix="Pad them to one length, or use all_to_all, which takes any lengths.",
            )


def check_kind(name: str, tensors: Tensors, one: torch.Tensor, size: int) -> None:
    """``tensors`` has a tensor for each rank, of the dtype of ``one``."""
    _check_same(name, tensors, one)
    if len(tensors) != size:
        raise CollectiveError(
            f"{name} of {size} ranks got a list of {len(tensors)} tensors.",
            fix=f"Give it {size} tensors, one for each rank of the group.",
        )


def check_whole(name: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """``whole`` holds one ``part`` for each rank."""
    _check_same(name, [whole], part)
    if whole.numel() != size * part.numel():
        raise CollectiveError(
            f"{name} of {size} ranks: {whole.numel()} elements are not {size} times {part.numel()}.",
            fix=f"Give it tensors of {size * part.numel()} and {part.numel()} elements.",
        )


def check_rows(name: str, tensor: torch.Tensor, splits: Sequence[int], size: int) -> None:
    """The rows of ``tensor`` can be split among the ranks like that."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not tensor.dim() or (rows % size if not splits else len(splits) != size or sum(splits) != rows):
        how = f"as {list(splits)}" if splits else "into equal parts"
        raise CollectiveError(
            f"{name} cannot split a tensor of shape {tuple(tensor.shape)} among {size} ranks {how}.",
            fix=f"Give {size} splits whose sum is the number of rows.",
        )


def _check_same(name: str, tensors: Tensors, one: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != one.dtype:
            raise CollectiveError(
                f"{name} got tensors of {tensor.dtype} and of {one.dtype}.",
                fix="Convert them to one dtype first.",
            )
    if not is_plain(tensors):
        devices = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
        raise CollectiveError(
            f"{name} got tensors on {devices} and on {one.device}.",
            fix="Move them to one device first.",
        )
