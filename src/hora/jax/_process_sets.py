"""Process sets: collectives among some of the ranks.

Every rank of the job makes a set, in the same order, whether it is in it or not. Afterwards only the
members call collectives with ``process_set=`` outside of ``jit``; inside, where all ranks run one program,
all do.
"""

from __future__ import annotations

from collections.abc import Iterable

from hora.adapter import process_sets as sets
from hora.core.errors import CollectiveError
from hora.jax._context import current, required

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "member_set",
    "process_set_ids",
    "process_set_included",
    "remove_process_set",
]


class ProcessSet(sets.ProcessSet):
    """A subset of the job's ranks.

    It can be used after ``add_process_set``, or after ``init(process_sets=[...])``, on all ranks.

    Args:
        ranks: its ranks, each once; kept in ascending order. An MPI communicator is refused.

    Attributes:
        process_set_id: 0 for the set of all ranks, 1 and up for others; None while it cannot be used.
        ranks: the ranks of the job that belong to it, ascending.
        mpi_comm: always None; Horovod's name for the communicator that a set may be made of there.
    """

    current = current


class _Everyone(ProcessSet, sets.Everyone):
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
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    sets.refuse_used(added)
    return sets.add(added, required("add_process_set"))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up a process set. Every rank of the job calls it, in the same order.

    Returns:
        Whether it was removed: False for the set of all ranks, and for one that is not in use.
    """
    context = required("remove_process_set")
    number = process_set.process_set_id
    removed = sets.remove(process_set, context)
    if removed and number is not None:
        context.meshes.pop(number, None)
    return removed


def process_set_included(process_set_id: int = 0) -> bool:
    """Whether this worker is in the process set of this id.

    Raises:
        CollectiveError: there is no such process set.
    """
    return sets.included(required("process_set_included"), process_set_id)


def process_set_ids() -> list[int]:
    """The ids of the process sets in use, 0 included."""
    return sets.ids(required("process_set_ids"))


def member_set(process_set: ProcessSet, *, function: str, inside: bool = False) -> ProcessSet:
    """The set itself, if this worker can call ``function`` on it: inside ``jit``, as a rank that is not in
    it too.

    Raises:
        CollectiveError: it is not in use, or this worker is not in it.
    """
    if inside and isinstance(process_set, ProcessSet) and process_set.included() is False:
        return process_set
    found: ProcessSet = sets.member_set(process_set, function=function, kind=ProcessSet)
    return found


def check_root(root_rank: int, process_set: ProcessSet, *, function: str) -> None:
    """Raise CollectiveError unless ``root_rank`` is a rank of the job, and of the process set."""
    size = required(function).world.size
    if isinstance(root_rank, bool) or not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise CollectiveError(
            f"{function}: root_rank={root_rank!r} is not a rank of this job (0 to {size - 1}).",
            fix=f"Write {function}(..., root_rank=0), or another rank below {size}.",
        )
    if root_rank not in process_set.members:
        raise CollectiveError(
            f"{function}: root_rank={root_rank} is not in {process_set}.",
            fix=f"Give the rank in the whole job of a member, such as {process_set.members[0]}.",
        )
