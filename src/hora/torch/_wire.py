"""How tensors travel: as flat vectors, and where lengths differ with a header that tells them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hora.core.errors import CollectiveError
from hora.torch import _context

__all__ = [
    "agree_on_rows",
    "as_bytes",
    "gather_bytes",
    "gather_flat",
    "join_bytes",
    "row_bytes",
    "start_gather",
    "wait_for",
]

_MAX_DIMENSIONS = 16
"""Dimensions of a tensor that a header describes to the other ranks; torch's own limit is 64."""

# torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_flat(output: torch.Tensor, wire: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill the vector ``output`` with all ranks' vectors ``wire``, which are of one length."""
    _all_gather(output, wire, group=group)


def start_gather(output: torch.Tensor, wire: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """As :func:`gather_flat`, without waiting."""
    work: dist.Work = _all_gather(output, wire, group=group, async_op=True)
    return work


def wait_for(work: Any, wire: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Wait for work of the operation that was the last to start; it is refused if a member has joined."""
    context = _context.required("synchronize")
    process_set = None
    if group is not context.group:
        process_set = next((each for each in context.process_sets.values() if each._group is group), None)
    context.presence.wait(work, wire.device, process_set=process_set)


def gather_bytes(wire: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All ranks' byte vectors, whose lengths every rank knows. Engines want equal lengths, so pad."""
    longest = max(lengths)
    if longest == 0:
        return [wire.new_empty(0) for _ in lengths]
    if wire.numel() < longest:
        wire = torch.cat([wire, wire.new_zeros(longest - wire.numel())])
    flat = wire.new_empty(longest * len(lengths))
    wait_for(start_gather(flat, wire, group), wire, group)
    return [row[:length] for row, length in zip(flat.view(len(lengths), longest), lengths, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a byte vector, so that every dtype travels alike (copied if not contiguous)."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Of one element or none, a contiguous tensor may still have any stride.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def join_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all tensors, one after the other; of a single one without a copy if it allows that."""
    vectors = [as_bytes(tensor) for tensor in tensors]
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors)


def agree_on_rows(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    *,
    control: torch.device,
    function: str,
) -> list[list[int]]:
    """First dimension of each tensor on each rank; the same error on all ranks if the rest differs.

    Args:
        tensors: this rank's, all with at least one dimension.
        group: the group that exchanges the headers.
        ranks: the members of ``group``, for messages.
        control: device of the headers.
        function: who asks, for messages.

    Returns:
        ``rows[tensor][member]``.
    """
    width = _MAX_DIMENSIONS + 2
    lines = [_header(tensor, width) for tensor in tensors]
    header = torch.tensor(lines, dtype=torch.int64, device=control)
    headers = header.new_empty(len(ranks) * header.numel())
    wait_for(start_gather(headers, header.reshape(-1), group), header, group)
    table: list[list[list[int]]] = headers.view(len(ranks), len(tensors), width).tolist()
    for rank, own in zip(ranks, table, strict=True):
        for first, row in zip(table[0], own, strict=True):
            _compare(first, row, ranks[0], rank, function=function)
    return [[table[member][index][2] for member in range(len(ranks))] for index in range(len(tensors))]


def _header(tensor: torch.Tensor, width: int) -> list[int]:
    dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else -1
    line = [dtype, tensor.dim(), *tensor.shape[: width - 2]]
    return line + [-1] * (width - len(line))


def _compare(first: list[int], row: list[int], first_rank: int, rank: int, *, function: str) -> None:
    if row[1] > _MAX_DIMENSIONS:
        raise CollectiveError(
            f"{function}: the tensor of rank {rank} has {row[1]} dimensions, more than {_MAX_DIMENSIONS}.",
            fix="Join some of them first: tensor.flatten(1).",
        )
    if row[:2] + row[3:] != first[:2] + first[3:]:
        raise CollectiveError(
            f"{function}: rank {first_rank} gave {_describe(first)}, but rank {rank} gave {_describe(row)}. "
            "Only the first dimension may differ.",
            fix="Give the same dtype and the same other dimensions on every rank.",
        )


_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)


def _describe(row: Sequence[int]) -> str:
    dtype = str(_DTYPES[row[0]]).removeprefix("torch.") if row[0] >= 0 else "unknown"
    return f"{dtype} of shape {tuple(row[2 : 2 + row[1]])}"


def row_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row of ``tensor``."""
    return tensor.element_size() * math.prod(tensor.shape[1:])
