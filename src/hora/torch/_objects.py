"""Python objects over the ranks, as pickles."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from hora.adapter.arguments import check_root
from hora.adapter.guard import collective
from hora.adapter.objects import pickled, refusal
from hora.torch._context import Context, required
from hora.torch._process_sets import ProcessSet, global_process_set, member_set
from hora.torch._wire import gather_bytes, start_gather, wait_for

__all__ = ["allgather_object", "broadcast_object"]

_FAILED = -1
"""Sent in place of a length by a rank whose object cannot be pickled, so that nobody waits for it."""


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of ``root_rank``, on every rank; that rank gets its own object back.

    Args:
        obj: anything that ``pickle`` takes; ignored on the other ranks.
        root_rank: whose object all ranks get; counted in the whole job, with a process set too.
        name: appears in the timeline.
        process_set: the ranks that take part; only they call.

    Raises:
        CollectiveError: on every rank, when the object cannot be pickled.
    """
    context = required("broadcast_object")
    member_set(process_set, function="broadcast_object")
    check_root(root_rank, context, function="broadcast_object", process_set=process_set)
    with context.timeline.span("broadcast_object", lane="collectives", **({"name": name} if name else {})):
        return send_object(obj, root_rank, context, process_set=process_set)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in the order of ranks.

    Args:
        obj: anything that ``pickle`` takes.
        name: appears in the timeline.
        process_set: the ranks that take part; only they call.

    Raises:
        CollectiveError: on every rank, when an object cannot be pickled.
    """
    context = required("allgather_object")
    member_set(process_set, function="allgather_object")
    with context.timeline.span("allgather_object", lane="collectives", **({"name": name} if name else {})):
        return gather_objects(obj, context, process_set=process_set)


def send_object(
    value: Any, root_rank: int, context: Context, *, process_set: ProcessSet = global_process_set
) -> Any:
    if len(process_set.members) == 1:
        return value
    with collective(context, "broadcast_object", process_set=process_set, root=root_rank):
        return _send(value, root_rank, context, process_set)


def _send(value: Any, root_rank: int, context: Context, process_set: ProcessSet) -> Any:
    mine = context.world.rank == root_rank
    data, problem = pickled(value) if mine else (b"", None)
    length = torch.tensor([_FAILED if problem else len(data)], dtype=torch.int64, device=context.control)
    group = process_set.group
    context.presence.call("broadcast_object", process_set)
    wait_for(dist.broadcast(length, root_rank, group=group, async_op=True), length, group)
    if length.item() == _FAILED:
        raise refusal(root_rank) from problem
    wire = (
        _tensor(data, context)
        if mine
        else torch.empty(int(length), dtype=torch.uint8, device=context.control)
    )
    wait_for(dist.broadcast(wire, root_rank, group=group, async_op=True), wire, group)
    return value if mine else pickle.loads(wire.cpu().numpy().tobytes())


def gather_objects(
    value: Any, context: Context, *, process_set: ProcessSet = global_process_set
) -> list[Any]:
    if len(process_set.members) == 1:
        return [value]
    with collective(context, "allgather_object", process_set=process_set):
        return _gather(value, context, process_set)


def _gather(value: Any, context: Context, process_set: ProcessSet) -> list[Any]:
    members = process_set.members
    data, problem = pickled(value)
    length = torch.tensor([_FAILED if problem else len(data)], dtype=torch.int64, device=context.control)
    everyone = length.new_empty(len(members))
    context.presence.call("allgather_object", process_set)
    wait_for(start_gather(everyone, length, process_set.group), length, process_set.group)
    lengths: list[int] = everyone.tolist()
    if _FAILED in lengths:
        raise refusal(members[lengths.index(_FAILED)]) from problem
    parts = gather_bytes(_tensor(data, context), lengths, process_set.group)
    return [pickle.loads(part.cpu().numpy().tobytes()) for part in parts]


def _tensor(data: bytes, context: Context) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(context.control)
