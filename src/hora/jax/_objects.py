"""Python objects over the ranks, as pickles."""

from __future__ import annotations

from typing import Any

from hora.adapter import objects
from hora.jax._context import required
from hora.jax._process_sets import ProcessSet, check_root, global_process_set, member_set

__all__ = ["allgather_object", "broadcast_object"]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    *,
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
    members = member_set(process_set, function="broadcast_object")
    check_root(root_rank, members, function="broadcast_object")
    return objects.broadcast_object(context, obj, root_rank, members, name=name)


def allgather_object(
    obj: Any, *, name: str | None = None, process_set: ProcessSet = global_process_set
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
    members = member_set(process_set, function="allgather_object")
    return objects.allgather_object(context, obj, members, name=name)
