"""Python objects over the ranks, as pickles in the store. The store itself never unpickles."""

from __future__ import annotations

import pickle
from typing import Any

from hora.adapter.arguments import check_root
from hora.adapter.context import Context
from hora.adapter.guard import Members, collective
from hora.core.errors import CollectiveError

__all__ = ["allgather_object", "broadcast_object", "pickled", "refusal"]

_FAILED = b"cannot be pickled"
_FINE = b"\0"


def broadcast_object(
    context: Context, value: Any, root_rank: int, process_set: Members | None = None, name: str | None = None
) -> Any:
    """The object of ``root_rank``, on every rank; that rank gets its own object back.

    Args:
        context: the job.
        value: anything that ``pickle`` takes; ignored on the other ranks.
        root_rank: whose object all ranks get; counted in the whole job, with a process set too.
        process_set: the ranks that take part; None: all.
        name: appears in the timeline and in the guard's words.

    Raises:
        CollectiveError: ``root_rank`` does not take part; or, on every rank, the object cannot be pickled.
        WorldError: a rank does not come in time, or has ended.
    """
    check_root(root_rank, context, function="broadcast_object", process_set=process_set)
    members = (context.everyone if process_set is None else process_set).members
    if len(members) == 1:
        return value
    mine = context.world.rank == root_rank
    data, problem = pickled(value) if mine else (b"", None)
    told = _told(
        context, "broadcast_object", data, problem, process_set=process_set, name=name, root=root_rank
    )
    theirs = told[members.index(root_rank)]
    if theirs == _FAILED:
        raise refusal(root_rank) from problem
    return value if mine else pickle.loads(theirs[1:])


def allgather_object(
    context: Context, value: Any, process_set: Members | None = None, name: str | None = None
) -> list[Any]:
    """The objects of all ranks, in the order of ranks.

    Args:
        context: the job.
        value: anything that ``pickle`` takes.
        process_set: the ranks that take part; None: all.
        name: appears in the timeline and in the guard's words.

    Raises:
        CollectiveError: on every rank, when an object cannot be pickled.
        WorldError: a rank does not come in time, or has ended.
    """
    members = (context.everyone if process_set is None else process_set).members
    if len(members) == 1:
        return [value]
    data, problem = pickled(value)
    told = _told(context, "allgather_object", data, problem, process_set=process_set, name=name)
    if _FAILED in told:
        raise refusal(members[told.index(_FAILED)]) from problem
    return [pickle.loads(part[1:]) for part in told]


def pickled(value: Any) -> tuple[bytes, Exception | None]:
    """The pickle, or nothing and why there is none."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), None
    except Exception as error:  # noqa: BLE001 - whatever the object's own methods raise
        return b"", error


def refusal(rank: int) -> CollectiveError:
    """What all ranks raise when the object of one cannot be pickled."""
    return CollectiveError(
        f"The object of rank {rank} cannot be pickled.",
        fix="Send plain data: numbers, texts, lists, dicts, numpy arrays, tensors.",
    )


def _told(
    context: Context,
    function: str,
    data: bytes,
    problem: Exception | None,
    *,
    process_set: Members | None,
    name: str | None,
    **details: Any,
) -> list[bytes]:
    named = {"name": name} if name else {}
    with (
        context.timeline.span(function, lane="collectives", **named),
        collective(context, function, process_set=process_set, label=name, **details),
    ):
        value = _FAILED if problem else _FINE + data
        return context.exchange(function, value, process_set=process_set)
