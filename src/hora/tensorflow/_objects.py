"""Python objects over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hora.adapter import objects
from hora.tensorflow._context import required
from hora.tensorflow._process_sets import ProcessSet, global_process_set, member_set

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn"]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of ``root_rank``, on every rank; that rank gets its own object back.

    Args:
        obj: anything that ``pickle`` takes; ignored on the other ranks.
        root_rank: whose object all ranks get; counted in the whole job, with a process set too.
        session: accepted for scripts written for Horovod.
        name: appears in the timeline.
        process_set: the ranks that take part; only they call.

    Raises:
        CollectiveError: ``root_rank`` does not take part; or, on every rank, the object cannot be pickled.
    """
    function = "broadcast_object"
    context = required(function)
    member_set(process_set, function=function)
    return objects.broadcast_object(context, obj, root_rank, process_set, name)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """:func:`broadcast_object` as a function of the object alone, as Horovod has it."""

    def broadcast(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The objects of all ranks, in the order of ranks.

    Args:
        obj: anything that ``pickle`` takes.
        session: accepted for scripts written for Horovod.
        name: appears in the timeline.
        process_set: the ranks that take part; only they call.

    Raises:
        CollectiveError: on every rank, when an object cannot be pickled.
    """
    function = "allgather_object"
    context = required(function)
    member_set(process_set, function=function)
    return objects.allgather_object(context, obj, process_set, name)
