"""Process sets: collectives among some of the ranks. What they are and what is refused, in every framework.

Every rank of the job makes a set, in the same order, whether it is in it or not; afterwards only the
members call collectives with ``process_set=``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from hora.adapter.agreement import require_same
from hora.adapter.context import Common, Context
from hora.adapter.current import Current
from hora.core.errors import CollectiveError

__all__ = [
    "Everyone",
    "ProcessSet",
    "add",
    "check",
    "ids",
    "included",
    "member_set",
    "refuse_used",
    "register",
    "remove",
]

GIVEN = "The ranks given to add_process_set"
GIVE_THE_SAME = "Every rank adds the same process sets in the same order, those that it is not in too."


class ProcessSet:
    """A subset of the job's ranks.

    It can be used after ``add_process_set``, or after ``init(process_sets=[...])``, on all ranks.

    Args:
        ranks: its ranks, each once; kept in ascending order. An MPI communicator is refused.

    Attributes:
        process_set_id: 0 for the set of all ranks, 1 and up for others; None while it cannot be used.
        ranks: the ranks of the job that belong to it, ascending.
        mpi_comm: always None; Horovod's name for the communicator that a set may be made of there.
    """

    current: ClassVar[Current[Any]]
    process_set_id: int | None = None
    ranks: list[int] | None
    mpi_comm: None = None

    def __init__(self, ranks: Iterable[int]) -> None:
        try:
            self.ranks = sorted(operator.index(rank) for rank in ranks)
        except TypeError:
            raise CollectiveError(
                f"ProcessSet takes a sequence of ranks, not {type(ranks).__name__} {ranks!r}.",
                fix="Write ProcessSet([0, 1]); MPI communicators are not supported.",
            ) from None

    def size(self) -> int | None:
        """Number of ranks in it; None while it cannot be used."""
        return len(self.members) if self._usable() else None

    def rank(self) -> int | None:
        """This worker's place in it, counted from 0; None if it is not in it, or while it cannot be used."""
        if not self._usable():
            return None
        mine, members = self.current.rank(), self.members
        return members.index(mine) if mine in members else None

    def included(self) -> bool | None:
        """Whether this worker is in it; None while it cannot be used."""
        return self.current.rank() in self.members if self._usable() else None

    @property
    def members(self) -> list[int]:
        """The ranks of the job that belong to it, known."""
        return self.ranks or []

    def forget(self) -> None:
        """Make the set unusable until it is added again."""
        self.process_set_id = None

    def unusable(self, function: str) -> CollectiveError:
        """The error of a set that is in no use, when ``function`` is called on it."""
        return CollectiveError(
            f"{function}: {self} was not added, or was removed.",
            fix="Call hora.add_process_set(process_set) on every rank first.",
        )

    def _usable(self) -> bool:
        return self.process_set_id is not None and self.current.is_initialized()

    def __repr__(self) -> str:
        return (  # as Horovod writes it
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )


class Everyone(ProcessSet):
    """The set of all ranks of whatever job is initialized."""

    process_set_id = 0

    def __init__(self) -> None:
        return

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        return list(range(self.current.size())) if self.current.is_initialized() else None


S = TypeVar("S", bound=ProcessSet)


def add(added: S, context: Context, *, make: Callable[[S], None] | None = None) -> S:
    """Make a process set usable. Every rank of the job calls it, in the same order.

    Args:
        added: a set that is in no use.
        context: the job.
        make: what the adapter's engine needs for it, on all ranks, before it has its id.

    Raises:
        CollectiveError: a rank that is not of this job or is given twice, an empty set, one that exists
            already, or, on all of them, ranks of the job that give different sets.
    """
    require_same(
        [str(added.members)],
        context,
        function="add_process_set",
        what=GIVEN,
        fix=GIVE_THE_SAME,
        error=CollectiveError,
    )
    refuse_used(added)
    check(added, context)
    if make is not None:
        make(added)
    register(added, context)
    return added


def remove(process_set: ProcessSet, context: Common) -> bool:
    """Give up a process set. Every rank of the job calls it, in the same order.

    Returns:
        Whether it was removed: False for the set of all ranks, and for one that is not in use.
    """
    number = process_set.process_set_id
    if number is None or number not in context.process_sets:
        return False
    del context.process_sets[number]
    process_set.forget()
    return True


def included(context: Common, process_set_id: int) -> bool:
    """Whether this worker is in the process set of this id.

    Raises:
        CollectiveError: there is no such process set.
    """
    if process_set_id == 0:
        return True
    found = context.process_sets.get(process_set_id)
    if found is None:
        raise CollectiveError(
            f"There is no process set with id {process_set_id!r}.",
            fix=f"Use one of {ids(context)}, or the process set's own included().",
        )
    return context.world.rank in found.members


def ids(context: Common) -> list[int]:
    """The ids of the process sets in use, 0 included."""
    return [0, *sorted(context.process_sets)]


def check(process_set: ProcessSet, context: Common) -> None:
    """Raise CollectiveError unless the set can be added."""
    ranks = process_set.members
    size = context.world.size
    wrong = [rank for rank in ranks if not 0 <= rank < size]
    if wrong or not ranks or len(set(ranks)) != len(ranks):
        raise CollectiveError(
            f"A process set of ranks {ranks} cannot be made in a job of ranks 0 to {size - 1}: "
            + ("it is empty." if not ranks else f"{wrong[0]} is no rank." if wrong else "one is repeated."),
            fix=f"Give ranks between 0 and {size - 1}, each once.",
        )
    same = [number for number, other in context.process_sets.items() if other.ranks == ranks]
    if len(ranks) == size or same:
        raise CollectiveError(
            f"A process set of ranks {ranks} exists already: its id is {same[0] if same else 0}.",
            fix="Use that one, or remove it first with hora.remove_process_set.",
        )


def register(process_set: ProcessSet, context: Common) -> int:
    """Give a checked set its id; all ranks together."""
    process_set.process_set_id = number = context.next_process_set
    context.next_process_set += 1
    context.process_sets[number] = process_set
    return number


def refuse_used(process_set: ProcessSet) -> None:
    """Raise CollectiveError if the set has an id already."""
    if process_set.process_set_id is not None:
        raise CollectiveError(
            f"{process_set} is in use already.", fix="Make a new ProcessSet, or remove this one first."
        )


def member_set(process_set: S, *, function: str, kind: type[S]) -> S:
    """The set itself, if this worker can call ``function`` on it.

    Args:
        process_set: what was given.
        function: for errors.
        kind: the adapter's class of process sets.

    Raises:
        CollectiveError: it is no process set, is not in use, or this worker is not in it.
    """
    if not isinstance(process_set, kind):
        raise CollectiveError(
            f"{function}: process_set is a {type(process_set).__name__}.",
            fix="Write process_set=hora.add_process_set([0, 1]).",
        )
    if isinstance(process_set, Everyone):
        return process_set
    if process_set.process_set_id is None:
        raise process_set.unusable(function)
    if not process_set.included():
        raise CollectiveError(
            f"{function}: rank {process_set.current.rank()} is not in {process_set}.",
            fix="Only its members call it: if process_set.included(): ...",
        )
    return process_set
