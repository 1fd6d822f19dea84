"""Collectives that move tensors without combining them: allgather, broadcast, alltoall; and the barrier.

They take every dtype and any memory layout. The same call on every rank, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hora.adapter.arguments import check_root
from hora.adapter.ops import Kind
from hora.torch._arguments import check_group, check_splits, check_tensor
from hora.torch._autograd import run
from hora.torch._context import required
from hora.torch._handles import Handle, submit
from hora.torch._process_sets import ProcessSet, global_process_set, member_set
from hora.torch._request import Request

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in the order of ranks.

    Args:
        tensor: any dtype. The first dimension may differ between ranks (0 too); the others and the
            dtype may not. A tensor without dimensions counts as one of shape ``(1,)``.
        name: appears in the timeline.
        process_set: the ranks that take part; only they call.

    Returns:
        A new tensor, equal on all ranks, with a gradient if ``tensor`` has one.

    Raises:
        CollectiveError: on every rank, when dtypes or other dimensions differ.
    """
    result: torch.Tensor = run(_gather([tensor], name, process_set, function="allgather"))
    return result


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an :func:`allgather`; ``synchronize`` gives its result, without a gradient."""
    return submit(_gather([tensor], name, process_set, function="allgather_async"))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """:func:`allgather` of several tensors in one message; a list of the results."""
    given = check_group(tensors, required("grouped_allgather"), function="grouped_allgather")
    results: list[torch.Tensor] = run(
        _gather(given, name, process_set, function="grouped_allgather", grouped=True)
    )
    return results


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a :func:`grouped_allgather`; ``synchronize`` gives the list, without gradients."""
    given = check_group(tensors, required("grouped_allgather_async"), function="grouped_allgather_async")
    return submit(_gather(given, name, process_set, function="grouped_allgather_async", grouped=True))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of ``root_rank``, on every rank.

    Args:
        tensor: the same shape and dtype on every rank; any dtype.
        root_rank: whose values all ranks get; counted in the whole job, with a process set too.
        name: appears in the timeline.
        process_set: the ranks that take part; only they call.

    Returns:
        A new tensor, with a gradient if ``tensor`` has one.

    Raises:
        CollectiveError: ``root_rank`` is not a rank of this job, or the device has no engine.
    """
    result: torch.Tensor = run(_cast(tensor, root_rank, name, process_set, function="broadcast"))
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a :func:`broadcast`; ``synchronize`` gives its result, without a gradient."""
    return submit(_cast(tensor, root_rank, name, process_set, function="broadcast_async"))


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As :func:`broadcast`, but the result overwrites the tensor, outside of autograd; returns the tensor."""
    submit(_cast(tensor, root_rank, name, process_set, function="broadcast_", in_place=True))()
    return tensor


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a :func:`broadcast_`; until ``synchronize`` returns, the tensor must be left alone."""
    request = _cast(tensor, root_rank, name, process_set, function="broadcast_async_", in_place=True)
    return submit(request, lambda _: tensor)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some rows of the tensor to each rank, and join the rows that come from each.

    Args:
        tensor: any dtype; all dimensions but the first are the same on every rank.
        splits: how many rows each rank gets, in the order of ranks, as a list or a tensor of integers;
            None to share the rows evenly.
        name: appears in the timeline.
        process_set: the ranks that take part; only they call.

    Returns:
        The received rows in the order of ranks, with a gradient if ``tensor`` has one. With ``splits`` a
        pair: those, and how many rows came from each rank (int32, where ``splits`` is).

    Raises:
        CollectiveError: splits that are no whole numbers, or do not sum to the rows of the tensor.
    """
    request = _scatter(tensor, splits, name, process_set, function="alltoall")
    return _received(run(request), splits)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an :func:`alltoall`; ``synchronize`` gives its result, without a gradient."""
    request = _scatter(tensor, splits, name, process_set, function="alltoall_async")
    return submit(request, lambda result: _received(result, splits))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has come here."""
    required("barrier")
    submit(Request(kind=Kind.BARRIER, process_set=member_set(process_set, function="barrier")))()


def _gather(
    tensors: list[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    function: str,
    grouped: bool = False,
) -> Request:
    context = required(function)
    for tensor in tensors:
        check_tensor(tensor, context, function=function)
    return Request(
        kind=Kind.ALLGATHER,
        name=name,
        tensors=tensors,
        process_set=member_set(process_set, function=function),
        grouped=grouped,
    )


def _cast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    function: str,
    in_place: bool = False,
) -> Request:
    context = required(function)
    check_tensor(tensor, context, function=function)
    member_set(process_set, function=function)
    check_root(root_rank, context, function=function, process_set=process_set)
    return Request(
        kind=Kind.BROADCAST,
        name=name,
        tensors=[tensor],
        outputs=[tensor] if in_place else None,
        root=root_rank,
        process_set=process_set,
    )


def _scatter(
    tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet, *, function: str
) -> Request:
    check_tensor(tensor, required(function), function=function)
    member_set(process_set, function=function)
    return Request(
        kind=Kind.ALLTOALL,
        name=name,
        tensors=[tensor],
        splits=check_splits(tensor, splits, process_set, function=function),
        process_set=process_set,
    )


def _received(result: Any, splits: Any) -> Any:
    output, received = result
    if splits is None:
        return output
    return output, received.to(splits.device) if isinstance(splits, torch.Tensor) else received
