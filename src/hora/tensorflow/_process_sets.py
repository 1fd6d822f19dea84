"""Process sets: collectives among some of the ranks."""

from __future__ import annotations

from collections.abc import Iterable

from hora.adapter import process_sets
from hora.tensorflow._context import current, required
from hora.tensorflow._engine import Group

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "group_of",
    "member_set",
    "process_set_ids",
    "process_set_included",
    "remove_process_set",
]


class ProcessSet(process_sets.ProcessSet):
    """A subset of the job's ranks.

    It can be used after ``add_process_set``, or after ``init(process_sets=[...])``, on all ranks.

    Args:
        ranks: its ranks, each once; kept in ascending order.

    Attributes:
        process_set_id: 0 for the set of all ranks, 1 and up for others; None while it cannot be used.
        ranks: the ranks of the job that belong to it, ascending.
        mpi_comm: always None; Horovod's name for the communicator that a set may be made of there.
    """

    current = current


class _Everyone(process_sets.Everyone, ProcessSet):
    """The set of all ranks of whatever job is initialized."""


global_process_set: ProcessSet = _Everyone()
"""All ranks of the job: what every collective uses unless told otherwise."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set usable. Every rank of the job calls it, in the same order.

    Args:
        process_set: a :class:`ProcessSet`, or the ranks of a new one.

    Raises:
        CollectiveError: a rank that is not of this job or is given twice, an empty set, one that exists
            already, or ranks of the job that give different sets (on all of them).
    """
    context = required("add_process_set")
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    return process_sets.add(added, context)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up a process set. Every rank of the job calls it, in the same order.

    Returns:
        Whether it was removed: False for the set of all ranks, and for one that is not in use.
    """
    return process_sets.remove(process_set, required("remove_process_set"))


def process_set_included(process_set_id: int = 0) -> bool:
    """Whether this worker is in the process set of this id.

    Raises:
        CollectiveError: there is no such process set.
    """
    return process_sets.included(required("process_set_included"), process_set_id)


def process_set_ids() -> list[int]:
    """The ids of the process sets in use, 0 included."""
    return process_sets.ids(required("process_set_ids"))


def member_set(process_set: ProcessSet, *, function: str) -> ProcessSet:
    """The set itself, if this worker can call ``function`` on it.

    Raises:
        CollectiveError: it is not in use, or this worker is not in it.
    """
    return process_sets.member_set(process_set, function=function, kind=ProcessSet)


def group_of(process_set: ProcessSet) -> Group:
    """A set of which this worker is a member, for the engine."""
    members = process_set.members
    return Group(process_set.process_set_id or 0, len(members), members.index(current.rank()))
