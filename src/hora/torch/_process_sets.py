"""Process sets: collectives among some of the ranks.

Every rank of the job makes a set, in the same order, whether it is in it or not; afterwards only the
members call collectives with ``process_set=``.
"""

from __future__ import annotations

import contextlib
import datetime
import operator
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from hora.adapter.guard import collective
from hora.core.errors import CollectiveError
from hora.torch import _context, _member

__all__ = [
    "ProcessSet",
    "add_process_set",
    "global_process_set",
    "member_set",
    "process_set_ids",
    "process_set_included",
    "register",
    "remove_process_set",
]


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
        self._group: dist.ProcessGroup | None = None

    def size(self) -> int | None:
        """Number of ranks in it; None while it cannot be used."""
        return len(self.members) if self._usable() else None

    def rank(self) -> int | None:
        """This worker's place in it, counted from 0; None if it is not in it, or while it cannot be used."""
        if not self._usable():
            return None
        mine, members = _context.rank(), self.members
        return members.index(mine) if mine in members else None

    def included(self) -> bool | None:
        """Whether this worker is in it; None while it cannot be used."""
        return _context.rank() in self.members if self._usable() else None

    @property
    def members(self) -> list[int]:
        """The ranks of the job that belong to it, known."""
        return self.ranks or []

    @property
    def group(self) -> dist.ProcessGroup:
        """The ``torch.distributed`` group that carries its collectives; members have it."""
        if self._group is None:
            raise self._unusable("This")
        return self._group

    def close(self) -> None:
        """Give up the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def forget(self) -> None:
        """Make the set unusable until it is added again."""
        self.process_set_id = None
        self._group = None

    def _usable(self) -> bool:
        return self.process_set_id is not None and _context.is_initialized()

    def _unusable(self, function: str) -> CollectiveError:
        return CollectiveError(
            f"{function}: {self} was not added, or was removed.",
            fix="Call hora.add_process_set(process_set) on every rank first.",
        )

    def __repr__(self) -> str:
        return (  # as Horovod writes it
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )


class _Global(ProcessSet):
    """The set of all ranks of whatever job is initialized."""

    process_set_id = 0

    def __init__(self) -> None:
        self._group = None

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        return list(range(_context.size())) if _context.is_initialized() else None

    @property
    def group(self) -> dist.ProcessGroup:
        return _context.required("global_process_set").group


global_process_set: ProcessSet = _Global()
"""All ranks of the job: what every collective uses unless told otherwise."""


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set usable. Every rank of the job calls it, in the same order.

    Args:
        process_set: a :class:`ProcessSet`, or the ranks of a new one.

    Raises:
        CollectiveError: a rank that is not of this job or is given twice, an empty set, one that exists
            already, or ranks of the job that give different sets (on all of them).
    """
    from hora.torch._agree import require_same  # it builds on this module

    context = _context.required("add_process_set")
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    require_same(
        [str(added.members)],
        context,
        function="add_process_set",
        what="The ranks given to add_process_set",
        fix="Every rank adds the same process sets in the same order, those that it is not in too.",
        error=CollectiveError,
    )
    check(added, context)
    register(added, context)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give up a process set. Every rank of the job calls it, in the same order.

    Returns:
        Whether it was removed: False for the set of all ranks, and for one that is not in use.
    """
    context = _context.required("remove_process_set")
    number = process_set.process_set_id
    if number is None or number not in context.process_sets:
        return False
    del context.process_sets[number]
    process_set.close()
    process_set.forget()
    return True


def process_set_included(process_set_id: int = 0) -> bool:
    """Whether this worker is in the process set of this id.

    Raises:
        CollectiveError: there is no such process set.
    """
    context = _context.required("process_set_included")
    if process_set_id == 0:
        return True
    found = context.process_sets.get(process_set_id)
    if found is None:
        raise CollectiveError(
            f"There is no process set with id {process_set_id!r}.",
            fix=f"Use one of {process_set_ids()}, or the process set's own included().",
        )
    return context.world.rank in found.members


def process_set_ids() -> list[int]:
    """The ids of the process sets in use, 0 included."""
    return [0, *sorted(_context.required("process_set_ids").process_sets)]


def check(process_set: ProcessSet, context: _context.Context) -> None:
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
    same = [other for other in (global_process_set, *context.process_sets.values()) if other.ranks == ranks]
    if same:
        raise CollectiveError(
            f"A process set of ranks {ranks} exists already: its id is {same[0].process_set_id}.",
            fix="Use that one, or remove it first with hora.remove_process_set.",
        )


def register(process_set: ProcessSet, context: _context.Context) -> None:
    """Give a checked set its group and its id; all ranks together, without asking whether they agree."""
    if process_set.process_set_id is not None:
        raise CollectiveError(
            f"{process_set} is in use already.", fix="Make a new ProcessSet, or remove this one first."
        )
    timeout = datetime.timedelta(seconds=context.settings.timeout)
    seen = contextlib.nullcontext() if context.guard is None else context.guard.connections.made()
    with collective(context, "add_process_set"), seen, _member.meeting(context.member) as made:
        group: Any = dist.new_group(process_set.members, timeout=timeout)
        made.append(group)
    process_set._group = group if context.world.rank in process_set.members else None
    process_set.process_set_id = context.next_process_set
    if context.guard is not None and process_set._group is not None:
        context.guard.add_group(process_set.process_set_id, group)
    context.next_process_set += 1
    context.process_sets[process_set.process_set_id] = process_set


def member_set(process_set: ProcessSet, *, function: str) -> ProcessSet:
    """The set itself, if this worker can call ``function`` on it.

    Raises:
        CollectiveError: it is not in use, or this worker is not in it.
    """
    if not isinstance(process_set, ProcessSet):
        raise CollectiveError(
            f"{function}: process_set is a {type(process_set).__name__}.",
            fix="Write process_set=hora.add_process_set([0, 1]).",
        )
    if process_set is global_process_set:
        return process_set
    if process_set.process_set_id is None:
        raise process_set._unusable(function)
    if not process_set.included():
        raise CollectiveError(
            f"{function}: rank {_context.rank()} is not in {process_set}.",
            fix="Only its members call it: if process_set.included(): ...",
        )
    return process_set
