"""Process sets: collectives among some of the ranks.

Every rank of the job makes a set, in the same order, whether it is in it or not; afterwards only the
members call collectives with ``process_set=``.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from hora.adapter import process_sets as shared
from hora.adapter.guard import collective
from hora.adapter.process_sets import check
from hora.core.errors import CollectiveError
from hora.torch import _context, _member

__all__ = [
    "ProcessSet",
    "add_process_set",
    "check",
    "global_process_set",
    "member_set",
    "process_set_ids",
    "process_set_included",
    "register",
    "remove_process_set",
]


class ProcessSet(shared.ProcessSet):
    __doc__ = shared.ProcessSet.__doc__

    current = _context.current
    _group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The ``torch.distributed`` group that carries its collectives; members have it."""
        if self._group is None:
            raise self.unusable("This")
        return self._group

    def close(self) -> None:
        """Give up the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def forget(self) -> None:
        """Make the set unusable until it is added again."""
        super().forget()
        self._group = None


class _Global(shared.Everyone, ProcessSet):
    """The set of all ranks of whatever job is initialized."""

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
        what=shared.GIVEN,
        fix=shared.GIVE_THE_SAME,
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
    if process_set.process_set_id in context.process_sets:
        process_set.close()
    return shared.remove(process_set, context)


def process_set_included(process_set_id: int = 0) -> bool:
    """Whether this worker is in the process set of this id.

    Raises:
        CollectiveError: there is no such process set.
    """
    return shared.included(_context.required("process_set_included"), process_set_id)


def process_set_ids() -> list[int]:
    """The ids of the process sets in use, 0 included."""
    return shared.ids(_context.required("process_set_ids"))


def register(process_set: ProcessSet, context: _context.Context) -> None:
    """Give a checked set its group and its id; all ranks together, without asking whether they agree."""
    shared.refuse_used(process_set)
    timeout = datetime.timedelta(seconds=context.settings.timeout)
    seen = contextlib.nullcontext() if context.guard is None else context.guard.connections.made()
    with collective(context, "add_process_set"), seen, _member.meeting(context.member) as made:
        group: Any = dist.new_group(process_set.members, timeout=timeout)
        made.append(group)
    process_set._group = group if context.world.rank in process_set.members else None
    number = shared.register(process_set, context)
    if context.guard is not None and process_set._group is not None:
        context.guard.add_group(number, group)


def member_set(process_set: ProcessSet, *, function: str) -> ProcessSet:
    """The set itself, if this worker can call ``function`` on it.

    Raises:
        CollectiveError: it is not in use, or this worker is not in it.
    """
    if process_set is global_process_set:  # as nearly always
        return process_set
    return shared.member_set(process_set, function=function, kind=ProcessSet)
